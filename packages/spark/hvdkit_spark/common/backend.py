"""Backends: they run the ranks of an estimator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hvdkit_spark.runner import run
from hvdkit_spark.session import count_slots, find_context


class Backend(Protocol):
    """Runs a function on ranks."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Run the function on the ranks and return the results, by rank."""

    def num_processes(self) -> int:
        """Return the number of ranks."""


class SparkBackend:
    """Runs the ranks by hvdkit_spark.run(). num_proc, env and the other arguments: see run()."""

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc, self._env, self._options = num_proc, dict(env or {}), kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """See Backend.run. Variables of the backend take precedence over `env`."""
        variables = {**(env or {}), **self._env}
        return run(fn, args, kwargs, num_proc=self.num_processes(), env=variables, **self._options)

    def num_processes(self) -> int:
        """See Backend.num_processes."""
        return self._num_proc if self._num_proc is not None else max(1, count_slots(find_context()))
