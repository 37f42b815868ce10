"""The reaction of hvdrun to the loss of ranks."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from hvdkit.config import Config


class Elasticity(enum.Enum):
    """off: the job ends. restart: hvdrun restarts it on the remaining hosts. survive: the other ranks continue."""

    OFF = "off"
    RESTART = "restart"
    SURVIVE = "survive"

    @property
    def variables(self) -> Mapping[str, str]:
        """The variables that pass it to the ranks."""
        if self is Elasticity.OFF:
            return {}
        return {"HVDKIT_ELASTIC": "1", **({"HVDKIT_ELASTIC_RESTARTS": "1"} if self is Elasticity.RESTART else {})}


def read_elasticity(config: Config) -> Elasticity:
    """Read the user's choice."""
    if not config.elastic:
        return Elasticity.OFF
    return Elasticity.RESTART if config.elastic_restarts else Elasticity.SURVIVE
