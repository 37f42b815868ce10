"""What a rank that others have started takes from the one that it is like."""

from __future__ import annotations

import os

from hvdkit.launch.agent.rank_identity import adopt_environment, name_process, read_environment_of


def test_a_rank_that_joins_has_the_variables_of_the_job_and_its_own_number() -> None:
    daemons = {
        "PATH": "/bin",
        "PMIX_RANK": "0",
        "PMIX_NAMESPACE": "job@2",
        "OMPI_COMM_WORLD_RANK": "0",
        "HOME": "/root",
    }
    others = {"PATH": "/venv/bin", "PMIX_RANK": "5", "PMIX_NAMESPACE": "job@1", "OMPI_COMM_WORLD_RANK": "5"}
    job = {"HVDKIT_CONTROL": "tcp:1:a", "OMPI_MCA_btl": "^ofi", "PRTE_LAUNCHED": "1"}
    found = adopt_environment(daemons, {**others, **job})
    assert found == {**daemons, "PATH": "/venv/bin", "HVDKIT_CONTROL": "tcp:1:a", "OMPI_MCA_btl": "^ofi"}
    assert name_process(found) == "job@2:0"


def test_the_variables_of_a_process_are_read_and_of_none_there_are_none() -> None:
    assert read_environment_of(os.getpid()).keys() <= os.environ.keys() | {"_"}
    assert read_environment_of(2**22 + 1) == {}


def test_a_process_that_no_launcher_with_pmix_has_started_has_no_name() -> None:
    assert name_process({"PMIX_RANK": "1"}) == ""
