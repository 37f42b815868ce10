"""What has to be changed in Horovod's source so that it compiles against newer frameworks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.tools.build_horovod.versions import Frameworks, parse_numbers

# Framework -> from which version on its headers want which C++ standard.
_STANDARDS = {
    "torch": (((2, 1), 17),),
    "tensorflow": (((2, 10), 17), ((2, 20), 20)),
}
# File of Horovod 0.28.1 -> the standard that is set in it, and the framework that it is compiled for ("": any).
_SET = {
    "CMakeLists.txt": (14, ""),
    "horovod/torch/CMakeLists.txt": (14, "torch"),
    "horovod/tensorflow/CMakeLists.txt": (17, "tensorflow"),
}


@dataclass(frozen=True)
class Mend:
    """One line of one file to be replaced; `new` empty: to be left out.

    old, new: the line without the blanks around it.
    """

    file: str
    old: str
    new: str
    why: str

    def __str__(self) -> str:
        change = f"{self.old} -> {self.new}" if self.new else f"leave out {self.old}"
        return f"{self.file}: {change} ({self.why})"


def choose_standard(frameworks: Frameworks) -> tuple[int, str]:
    """Choose the C++ standard, the highest that a framework wants, and tell which one; (14, "") if none wants any."""
    wanted = [(14, "")]
    for name in frameworks.names:
        version = getattr(frameworks, name)
        wanted += [
            (standard, f"{name} {version}") for least, standard in _STANDARDS[name] if parse_numbers(version) >= least
        ]
    return max(wanted, key=lambda item: item[0])


def choose_mends(frameworks: Frameworks) -> tuple[Mend, ...]:
    """Choose what these frameworks need of Horovod 0.28.1; both get the same C++ standard, as they share its core."""
    standard, wanted_by = choose_standard(frameworks)
    mends = [
        Mend(file, _standard_line(present), _standard_line(standard), f"{wanted_by} needs C++{standard}")
        for file, (present, framework) in _SET.items()
        if present < standard and (not framework or framework in frameworks.names)
    ]
    if frameworks.tensorflow:
        mends.append(
            Mend(
                "horovod/tensorflow/CMakeLists.txt",
                'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")',
                "",
                "TensorFlow's wheels lack a header that it needs; operations inside XLA are the loss",
            )
        )
    return tuple(mends)


def apply_mends(tree: Path, mends: tuple[Mend, ...]) -> None:
    """Change the files below `tree`; none of them unless each mend finds its line exactly once.

    Raises BuildError telling every mend that does not fit.
    """
    texts: dict[str, list[str]] = {}
    problems = []
    for mend in mends:
        if mend.file not in texts:
            path = tree / mend.file
            texts[mend.file] = path.read_text().splitlines(keepends=True) if path.is_file() else []
        lines = texts[mend.file]
        places = [number for number, line in enumerate(lines) if line.strip() == mend.old]
        if len(places) != 1:
            problems.append(f"{mend.file} has the line {mend.old!r} {len(places)} times")
            continue
        before = lines[places[0]]
        lines[places[0]] = before.replace(mend.old, mend.new) if mend.new else ""
    if problems:
        raise BuildError(
            f"The source in {tree} is not the one that hvdkit knows how to mend: {'; '.join(problems)}, instead of "
            "once. Take Horovod's unchanged release, or compile your source by its own instructions."
        )
    for file, lines in texts.items():
        (tree / file).write_text("".join(lines))


def _standard_line(standard: int) -> str:
    return f"set(CMAKE_CXX_STANDARD {standard})"
