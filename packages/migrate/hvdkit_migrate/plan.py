"""The plan for a script: its findings and its rewritten text."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from hvdkit_migrate.ambiguous import report_unclear, resolve_ambiguity
from hvdkit_migrate.detect import detect, is_for_keras
from hvdkit_migrate.draft import Draft
from hvdkit_migrate.files import MigrateError
from hvdkit_migrate.findings import Finding, apply, merge
from hvdkit_migrate.imports import begin, drop_unused, ready_from
from hvdkit_migrate.rules.advice import advise
from hvdkit_migrate.rules.ddp import drop_init, replace_collectives, unwrap_models, use_ranks
from hvdkit_migrate.rules.decisions import agree, wait_for_files
from hvdkit_migrate.rules.devices import choose_devices, mentions_cuda
from hvdkit_migrate.rules.foreign import report_by_hand, report_foreign
from hvdkit_migrate.rules.horovod import rename_imports
from hvdkit_migrate.rules.keras3 import adapt_keras2_habits
from hvdkit_migrate.rules.keras_fit import distribute_fit
from hvdkit_migrate.rules.loaders import shard_loaders
from hvdkit_migrate.rules.optimizers import wrap_optimizers
from hvdkit_migrate.rules.rank_zero import guard_rank_zero
from hvdkit_migrate.rules.splits import fix_splits
from hvdkit_migrate.script import Script
from hvdkit_migrate.training import Training


@dataclass(frozen=True)
class Plan:
    """The findings of a script and its rewritten text.

    path: its path.
    kind: one of detect.KINDS.
    findings: the findings.
    before, after: the whole text.
    """

    path: str
    kind: str
    findings: tuple[Finding, ...]
    before: str
    after: str

    def of(self, kind: str) -> list[Finding]:
        """Select the findings of a kind."""
        return [one for one in self.findings if one.kind == kind]


def plan(text: str, path: str, kind: str | None = None) -> Plan:
    """Read a script and plan its migration. kind: one of detect.KINDS, or None to detect it.

    Raises MigrateError for a text that is not Python, or of no known kind.
    """
    script = Script(text, path)
    found = detect(script)
    kind = found if kind is None or found == "hvdkit" else kind
    if not kind:
        raise MigrateError(
            f"{path}: imports neither torch, keras, tensorflow nor horovod, so there is nothing to migrate. Pass "
            "the training script, or name its kind with --from."
        )
    script, unclear = resolve_ambiguity(script, lambda one: _apply_rules(one, kind).findings)
    draft = _apply_rules(script, kind)
    report_unclear(draft, unclear)
    findings = draft.findings
    edits, dropped = merge(findings)
    findings = [_by_hand(one) if one in dropped else one for one in findings]
    after = apply(text, edits)
    try:
        ast.parse(after)
    except SyntaxError as error:
        line = after.splitlines()[(error.lineno or 1) - 1].strip()
        findings = [_by_hand(one) if one.edits else one for one in findings]
        findings.append(
            Finding(
                "break",
                1,
                f"hvdkit migrate produced the invalid line {line!r}.",
                "the changes by hand, and report this as a bug",
            )
        )
        after = text
    return Plan(path, kind, tuple(sorted(findings, key=lambda one: one.line)), text, after)


def _apply_rules(script: Script, kind: str) -> Draft:
    draft = Draft(script, _alias(script))
    _RULES[kind](draft)
    return draft


def _by_hand(finding: Finding) -> Finding:
    if not finding.edits:
        return finding
    return replace(finding, kind="break", write="this by hand: it overlaps another change of the same text", edits=())


def _alias(script: Script) -> str:
    """Return hvdkit's name in the script: Horovod's name there, or hvd unless that has another meaning."""
    packages = (
        "horovod.torch",
        "horovod.keras",
        "horovod.tensorflow",
        "hvdkit.torch",
        "hvdkit.keras",
        "hvdkit.tensorflow",
        "horovod.tensorflow.keras",
        "hvdkit.tensorflow.keras",
    )
    found = [one for one in script.names.imports if one.full in packages]
    found.sort(key=lambda one: one.scope is not one.scope.globals)
    if found:
        return found[0].local
    return "hvd" if "hvd" not in script.words else "hvdkit_ranks"


def _from_torch(draft: Draft) -> None:
    _distribute_torch(draft, scale=True)
    training = Training(draft.script, draft.bindings)
    _begin(draft, "hvdkit.torch", gpu=bool(training.optimizers) and mentions_cuda(draft))


def _distribute_torch(draft: Draft, *, scale: bool) -> None:
    training = Training(draft.script, draft.bindings)
    draft.ready = ready_from(draft.script)
    report_foreign(draft)
    report_by_hand(draft)
    unwrap_models(draft)
    shard_loaders(draft, training)
    wrap_optimizers(draft, training, scale=scale)
    choose_devices(draft)
    fix_splits(draft)
    agree(draft, training)
    guard_rank_zero(draft)
    advise(draft, training)


def _from_ddp(draft: Draft) -> None:
    draft.ready = ready_from(draft.script)
    training = Training(draft.script, draft.bindings)
    report_foreign(draft)
    report_by_hand(draft)
    drop_init(draft)
    unwrap_models(draft)
    use_ranks(draft)
    replace_collectives(draft)
    draft.is_distributed = True
    wrap_optimizers(draft, training, scale=False)
    fix_splits(draft)
    drop_unused(
        draft,
        (
            "torch.distributed",
            "torch.nn.parallel",
            "torch.utils.data.distributed",
            "torch.utils.data.DistributedSampler",
        ),
    )
    _begin(draft, "hvdkit.torch", gpu=False)


def _from_horovod(draft: Draft) -> None:
    draft.is_distributed = True
    report_foreign(draft)
    rename_imports(draft)
    if is_for_keras(draft.script):
        adapt_keras2_habits(draft)


def _from_keras(draft: Draft) -> None:
    draft.ready = ready_from(draft.script)
    report_foreign(draft)
    adapt_keras2_habits(draft)
    distribute_fit(draft)
    fix_splits(draft)
    wait_for_files(draft)
    guard_rank_zero(draft, keras=True)
    _begin(draft, "hvdkit.keras", gpu=False)


def _from_hvdkit(draft: Draft) -> None:
    draft.is_distributed = True
    if is_for_keras(draft.script):
        adapt_keras2_habits(draft)


def _begin(draft: Draft, module: str, *, gpu: bool) -> None:
    lines = []
    if gpu:
        torch = draft.need_import("torch", draft.script.tree)
        lines = [f"if {torch}.cuda.is_available():", f"    {torch}.cuda.set_device({draft.hvd}.local_device())"]
    begin(draft, module, after_init=lines)


_RULES = {
    "torch": _from_torch,
    "ddp": _from_ddp,
    "horovod": _from_horovod,
    "keras": _from_keras,
    "hvdkit": _from_hvdkit,
}
