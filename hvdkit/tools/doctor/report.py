"""Output of doctor: the verdict and the findings first, then requested tables; or JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdkit.gpu_vendors import AMD, INTEL, NVIDIA, find_vendor
from hvdkit.launch.plan.network import is_inside
from hvdkit.tools.doctor.checks.gpus import list_builds, read_selection
from hvdkit.tools.doctor.checks.mpi import Ability, assess_engines, assess_transports, list_choices
from hvdkit.tools.doctor.collect.software import framework_versions
from hvdkit.tools.doctor.facts import KIND_NAMES, HostFacts
from hvdkit.tools.doctor.findings import SEVERITIES, Finding
from hvdkit.tools.doctor.survey import Survey, describe_subnet, find_common_subnets
from hvdkit.tools.installed import PACKAGES_OF

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
Row = tuple[str, ...]


def print_verdict(findings: Sequence[Finding], console: Console, *, quiet: bool = False) -> None:
    """Print the number of findings, then each as a short paragraph. quiet: only errors and warnings."""
    counts = {name: sum(finding.severity == name for finding in findings) for name in SEVERITIES}
    if not quiet:
        verdict = ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count)
        console.print(f"[bold]{verdict or 'Nothing is wrong.'}[/]", highlight=False)
    for finding in findings:
        if quiet and finding.severity == "note":
            continue
        where = f" [{', '.join(finding.hosts)}]" if finding.hosts else ""
        style = _STYLES[finding.severity]
        console.print(
            f"[{style}]{finding.severity}[/] {escape(finding.name)}{escape(where)}: {escape(finding.seen)}",
            soft_wrap=True,
        )
        console.print(f"    {escape(finding.cure)}", highlight=False, soft_wrap=True)
    if findings and not quiet:
        console.print(
            "All findings are described by `hvdkit docs reference/findings`.",
            highlight=False,
            soft_wrap=True,
        )


def print_host_tables(facts: HostFacts, console: Console) -> None:
    """Print the installed software of a host, the engines and transports that work, and the chosen ones."""
    console.print(build_table(f"installed on {facts.host}", ("part", "version", "location"), list_parts(facts)))
    abilities = [*_list_abilities("engine", assess_engines(facts)), *_list_abilities("", assess_transports(facts))]
    console.print(build_table("engines and transports", ("", "name", "works", "reason"), abilities))
    choices = [(choice.start, choice.engine, choice.transport, choice.why) for choice in list_choices(facts)]
    console.print(build_table("chosen by init()", ("start", "engine", "transport", "reason"), choices))


def print_survey_tables(survey: Survey, console: Console) -> None:
    """Print a row for each host, and the connections between them."""
    titles: Row = ("host", "slots", "cores", "GPUs", "Python", "frameworks", "MPI", "/dev/shm free", "clock")
    console.print(build_table("hosts", titles, _list_hosts(survey)))
    if len(survey.hosts) > 1:
        titles = ("from", *(host.name for host in survey.hosts))
        console.print(build_table("connections by host name", titles, _list_connections(survey)))
    for subnet in find_common_subnets(survey):
        console.print(f"shared by all: {describe_subnet(survey, subnet)}, {_describe_bandwidth(survey, subnet)}")
    console.print(f"duration: {survey.seconds:.1f} s")


def describe_small_job(survey: Survey) -> str:
    """Describe the result of the small job in a sentence; "" if it was not run."""
    job = survey.allreduce
    if job is None or job.error:
        return ""
    expected = f"; {job.expected_s * 1e3:.0f} ms are expected from the network" if job.expected_s else ""
    hosts = f"{len(survey.hosts)} host{'s' * (len(survey.hosts) > 1)}"
    return (
        f"{len(job.ranks)} ranks on {hosts} reduced {job.bytes / 2**20:.0f} MiB in "
        f"{job.seconds * 1e3:.0f} ms over {job.transport}{expected}."
    )


def list_parts(facts: HostFacts) -> Iterator[Row]:
    """List the installed software; missing software has a row too."""
    packages = facts.packages
    yield "Python", facts.python, facts.executable
    yield "hvdkit", facts.hvdkit, facts.hvdkit_folder
    yield "torch", packages.get("torch", "-"), _describe_cuda(facts, "torch")
    names = [name for name in PACKAGES_OF["tensorflow"] if name in packages]
    kinds = ", ".join([*names, *filter(None, [_describe_cuda(facts, "tensorflow")])])
    yield "TensorFlow", ", ".join(packages[name] for name in names) or "-", kinds
    backend = f"backend {facts.keras_backend} (from {facts.keras_backend_origin})" if "keras" in packages else ""
    yield "Keras", packages.get("keras", "-"), backend
    yield "JAX", packages.get("jax", "-"), _describe_cuda(facts, "jax")
    yield from _list_mpi(facts)
    yield from _list_horovod(facts)
    yield from _list_gpus(facts)


def build_table(title: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Build a table of plain text."""
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for name in titles:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _list_abilities(kind: str, abilities: Iterable[Ability]) -> Iterable[Row]:
    for number, ability in enumerate(abilities):
        why = " ".join([f"{ability.why}.", ability.cure]) if ability.cure else ability.why
        yield (kind or "transport") if not number else "", ability.name, "yes" if ability.works else "no", why


def _list_mpi(facts: HostFacts) -> Iterator[Row]:
    mpi, hvdrun = facts.mpi, facts.hvdrun
    yield "mpi4py", mpi.mpi4py or "-", ""
    yield "MPI library", mpi.name or "-", mpi.path or mpi.error
    if mpi.library:
        yield "", f"MPI {mpi.standard}, {mpi.threads or 'does not start'}", "" if mpi.threads else mpi.error
    for launcher in facts.launchers:
        version = f"{KIND_NAMES.get(launcher.kind, '')} {launcher.version}".strip() or "does not work"
        yield launcher.name, version, launcher.path
    if hvdrun.mpirun:
        origin = "on PATH" if hvdrun.site else "from this environment"
        yield "hvdrun uses", f"{hvdrun.name} {hvdrun.version}, {origin}", hvdrun.mpirun
    else:
        yield "hvdrun uses", "-", ""


def _list_horovod(facts: HostFacts) -> Iterator[Row]:
    horovod = facts.horovod
    if not horovod.version:
        yield "Horovod", "-", ""
        return
    yield "Horovod", f"{horovod.version} for {', '.join(horovod.bindings) or 'no framework'}", horovod.folder
    if horovod.loaded:
        yield "", f"built with {', '.join(horovod.parts) or 'neither MPI nor Gloo'}", ""


def _list_gpus(facts: HostFacts) -> Iterator[Row]:
    found = facts.accelerators
    if found.gpus:
        names = dict.fromkeys(gpu.name for gpu in found.gpus)
        cuda = f" for CUDA {found.driver_cuda}" if found.driver_cuda else ""
        chosen = [f"{name}={value}" for name, value in read_selection(facts).items()]
        runtime = f", {found.runtime}" if found.runtime else ""
        software = f"driver {found.driver or 'unknown'}{cuda}{runtime}"
        yield "GPUs", f"{len(found.gpus)}: {', '.join(names)}; {software}", ", ".join(chosen) or "all visible"
    else:
        yield "GPUs", "-", found.error or (f"/dev has {', '.join(found.devices)}" if found.devices else "")
    library = find_vendor(found.vendor).library
    yield library, found.nccl or ("version unknown" if found.nccl_path else "-"), found.nccl_path
    if found.vendor == NVIDIA.name:
        yield "CUDA toolkit", "found" if found.cuda_home else "-", found.cuda_home


def _describe_cuda(facts: HostFacts, framework: str) -> str:
    build = list_builds(facts).get(framework)
    kind = {AMD.name: "HIP", INTEL.name: "XPU"}.get(facts.accelerators.vendor, "CUDA")
    return (
        "" if build is None else f"for {kind} {build}" if build else "for CPUs" if kind == "CUDA" else f"not for {kind}"
    )


def _list_hosts(survey: Survey) -> Iterator[Row]:
    for host in survey.hosts:
        facts = host.facts
        slots = str(host.slots or "?")
        if facts is None:
            yield host.name, slots, "no answer", *[""] * 6
            continue
        machine = facts.machine
        frameworks = ", ".join(f"{name} {version}" for name, version in framework_versions(facts.packages).items())
        yield (
            host.name,
            slots,
            f"{len(machine.cpu.allowed)} of {machine.cpu.cores}",
            str(len(facts.accelerators.gpus) or "-"),
            facts.python,
            frameworks or "-",
            facts.mpi.name or "-",
            f"{machine.shared.free_bytes / 1e9:.1f} GB",
            f"{host.offset_s:+.3f} s",
        )


def _list_connections(survey: Survey) -> Iterator[Row]:
    for source in survey.hosts:
        cells = []
        for target in survey.hosts:
            named = [
                each
                for each in survey.reaches
                if each.named and (each.source, each.target) == (source.name, target.name)
            ]
            if source is target:
                cells.append("")
            elif not named:
                cells.append("?")
            elif all(each.problem for each in named):
                cells.append(f"no: {named[0].problem}")
            else:
                speed = max(each.mbit for each in named)
                cells.append(f"{speed:.0f} Mbit/s" if speed else "yes")
        yield source.name, *cells


def _describe_bandwidth(survey: Survey, subnet: str) -> str:
    rates = [each.mbit for each in survey.reaches if each.mbit and is_inside(each.address, subnet)]
    return f"{min(rates):.0f} Mbit/s" if rates else "not measured"


def build_document(facts: HostFacts, findings: Sequence[Finding], *, code: int) -> dict[str, Any]:
    """Build the document for --json: facts, abilities, choices, findings, and the number of each severity.

    code: the exit code.
    """
    return {
        "facts": asdict(facts),
        "engines": _list(assess_engines(facts)),
        "transports": _list(assess_transports(facts)),
        "choices": _list(list_choices(facts)),
        **_conclude(findings, code),
    }


def build_survey_document(survey: Survey, findings: Sequence[Finding], *, code: int) -> dict[str, Any]:
    """Build the document for several hosts: facts of each and of connections, then findings."""
    return {**asdict(survey), **_conclude(findings, code)}


def _conclude(findings: Sequence[Finding], code: int) -> dict[str, Any]:
    return {
        "findings": _list(findings),
        "counts": {name: sum(finding.severity == name for finding in findings) for name in SEVERITIES},
        "exit_code": code,
    }


def _list(items: Iterable[Any]) -> list[dict[str, Any]]:
    return [asdict(item) for item in items]
