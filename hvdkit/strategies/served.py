"""Base class of strategies whose ranks communicate with servers (server.py), not in collectives."""

from __future__ import annotations

from hvdkit.engine.api import COMPLEX, Group, Parameters, Strategy, check_tensors, other_engine
from hvdkit.strategies.server import RequestHandler, ServerClient


class ParameterServerStrategy(Strategy):
    """A strategy that opens its servers in open(), and closes them in detach()."""

    #: The name in messages.
    who: str

    def __init__(self) -> None:
        self._links: list[ServerClient] = []

    def describe(self, size: int) -> str:
        """Describe the settings, which must be equal on all ranks. ValueError for an unsuitable number of ranks."""
        raise NotImplementedError

    def open(self, parameters: Parameters, group: Group) -> None:
        """Open the servers for some parameters; collective."""
        raise NotImplementedError

    def check(self, what: str, dtype: str) -> None:
        super().check(what, dtype)
        if dtype in COMPLEX:
            raise TypeError(f"{what} has dtype {dtype}, which {self.who} cannot train. Use real numbers.")

    def enter(self, group: Group) -> None:
        """See Strategy.enter. hvd.join() is refused from now on, as long as the strategy exists."""
        group.engine.joining.refusals[self] = (
            f"{self.who} waits for every rank in its steps. Call optimizer.finish() on all ranks after their last "
            "step, in place of hvd.join()."
        )

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach. Raises ValueError if the engine or the number of ranks does not allow it."""
        self.detach()
        if other_engine():
            raise ValueError(
                f"{self.who} needs the native engine: {other_engine()} has no messages from rank to rank. Set "
                "HVDKIT_ENGINE=native."
            )
        words = self.describe(group.transport.size)
        check_tensors(group.transport, parameters.tensors, words)
        if not parameters.tensors:
            return
        self.open(parameters, group)

    def open_server(self, group: Group, root: int, count: int, dtype: str, service: RequestHandler) -> None:
        """Open one more server; collective. See ServerClient."""
        own = group.transport.split([range(group.transport.size)])
        assert own is not None
        self._links.append(ServerClient(own, root, count, dtype, service))

    def detach(self) -> None:
        links, self._links = self._links, []
        for link in links:
            link.close()
