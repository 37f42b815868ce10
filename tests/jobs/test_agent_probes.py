"""An agent of another host that does not answer is reported, and given up where the job waits for nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import cast

import pytest

from hvdkit.launch.agent import wire
from hvdkit.launch.agent.wire import connect_to_hvdrun
from hvdkit.launch.run.agent_probes import PROBE_S, AgentProbes
from hvdkit.launch.state.authenticated_server import Channel
from hvdkit.launch.state.control import ControlServer
from hvdkit.launch.state.outcome import Outcome, conclude
from hvdkit.launch.state.ranks import End, Phase, Ranks, Start
from hvdkit.launcher_channel import TRAINED


class Agent:
    """hvdrun's side of the connection to an agent, which answers each probe unless it is stopped."""

    def __init__(self) -> None:
        self.stopped = self.aborted = False
        self.received = self.probes = 0

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        assert kind == wire.PROBE
        self.probes += 1
        if not self.stopped:
            self.received += 69

    def abort(self) -> None:
        self.aborted = True


class Job:
    """Three ranks that run on node0 to node2, of which an agent is lost when hvdrun closes its connection."""

    def __init__(self, agents_may_stop_s: float = 0.0) -> None:
        self.now, self.said = 1000.0, list[str]()
        self.ranks = Ranks(3, clock=lambda: self.now)
        self.agents = {rank: Agent() for rank in range(3)}
        for rank in range(3):
            self.ranks.register(rank, f"node{rank}")
            self.ranks.start(rank, Start(700 + rank, "1", "0", bound=False))
        connected = cast("dict[int, Channel]", self.agents)
        self.probes = AgentProbes(self.ranks, connected, self.said.append, agents_may_stop_s=agents_may_stop_s)

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1
            self.probes.check()
            for rank in [rank for rank, agent in self.agents.items() if agent.aborted]:
                del self.agents[rank]
                self.ranks.lose(rank)

    def end(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks.end(rank, End(0))
            del self.agents[rank]


REPORT = (
    "the agent of rank 1 on node1 has not answered for 10 s, and the job cannot end without it; if a signal has "
    "stopped it, this continues it on node1: kill -CONT $(ps -o ppid= -p 701)"
)


def test_an_agent_that_answers_is_probed_seldom_and_not_reported() -> None:
    job = Job()
    job.run(600)
    assert not job.said and not job.ranks.lost
    assert all(0 < agent.probes <= 600 / PROBE_S / 2 for agent in job.agents.values())


def test_an_agent_that_sends_something_else_is_not_probed() -> None:
    job = Job()
    for _ in range(100):
        job.agents[1].received += 100
        job.run(PROBE_S)
    assert not job.agents[1].probes and job.agents[2].probes


def test_a_stopped_agent_is_reported_once_with_the_cure_and_kept_while_all_ranks_run() -> None:
    job = Job()
    job.agents[1].stopped = True
    job.run(600)
    assert job.said == [REPORT] and not job.ranks.lost
    assert job.agents[1].probes == 1  # the others would fill its connection
    job.agents[1].stopped = False
    job.agents[1].received += 69
    job.run(600)
    assert job.said == [REPORT, "the agent of rank 1 on node1 answers again."]


@pytest.mark.parametrize("ends", ["others have ended", "training has ended"])
def test_a_stopped_agent_is_given_up_at_the_end_of_the_job(ends: str) -> None:
    job = Job()
    job.run(100)
    job.agents[1].stopped = True
    if ends == "others have ended":
        job.end(0, 2)
    else:
        job.ranks.hear(0, [TRAINED])
    job.run(30)
    assert job.said == [REPORT] and not job.ranks.lost
    job.run(30)
    assert job.ranks.lost == job.ranks.failures == [1]
    result = conclude(job.ranks, 1)
    assert result.outcome is Outcome.RANK_DIED and result.code == 1
    assert result.lines == (
        "rank 1 on node1 was lost: its agent has not answered for 35 s, though its host has; it is stopped (SIGSTOP), "
        "or waits for a file system.",
    )


def test_an_agent_that_continues_in_time_is_not_given_up() -> None:
    job = Job()
    job.end(0, 2)
    for _ in range(5):
        job.agents[1].stopped = True
        job.run(30)
        job.agents[1].stopped = False
        job.agents[1].received += 69
        job.run(PROBE_S)
    assert not job.ranks.lost


def test_a_job_whose_other_ranks_run_on_is_not_ended_for_an_agent_that_waits_for_a_file_system() -> None:
    job = Job()
    job.end(0)
    job.agents[1].stopped = True
    job.run(600)
    assert job.said == [REPORT] and not job.ranks.lost
    job.agents[2].stopped = True  # nothing answers any more, as if all had been stopped
    job.run(60)
    assert job.ranks.lost


def test_a_short_patience_comes_after_the_report_with_the_cure() -> None:
    job = Job(agents_may_stop_s=1)
    job.agents[1].stopped = True
    job.run(4 * PROBE_S)
    assert job.said == [REPORT] and not job.ranks.lost
    job.run(PROBE_S)
    assert job.ranks.lost == [1]


def test_an_elastic_job_gives_a_stopped_agent_up_after_its_patience_at_any_time() -> None:
    job = Job(agents_may_stop_s=60)
    job.agents[1].stopped = True
    job.run(60)
    assert not job.ranks.lost
    job.run(30)
    assert job.ranks.lost == [1] and job.ranks.states[1].phase is Phase.LOST
    assert job.agents.keys() == {0, 2}


def test_time_in_which_hvdrun_itself_did_not_run_does_not_count() -> None:
    """As where hvdrun was stopped, or waited for the reader of its output: answers are read after that only."""
    job = Job(agents_may_stop_s=5)
    for agent in job.agents.values():
        agent.stopped = True
    job.run(2 * PROBE_S)  # probes have been sent, and the answers come while hvdrun does not run
    assert all(agent.probes for agent in job.agents.values())
    job.now += 1000
    job.probes.check()
    for agent in job.agents.values():
        agent.stopped, agent.received = False, agent.received + 69
    job.run(100)
    assert not job.said and not job.ranks.lost


async def _probe_an_agent() -> tuple[list[bytes], int, int]:
    """What an agent's receive() returns of a probe between two frames, and how many bytes then come, and are left."""
    ranks = Ranks(3)
    control = ControlServer(ranks, lambda *_: None)
    await control.open(["127.0.0.1"], "")
    try:
        place, secret = control.variables["HVDKIT_CONTROL"], control.variables["HVDKIT_CONTROL_SECRET"]
        agent = await asyncio.to_thread(connect_to_hvdrun, place, secret, 1)
        agent.send(wire.HELLO, json.dumps({"rank": 1, "size": 3, "host": "n1"}).encode())
        await control.changed.wait_until(lambda: 1 in control.connected, 20)
        channel = control.connected[1]
        before = channel.received
        for kind in (wire.STDIN, wire.PROBE, wire.STOP):
            control.send(1, kind)

        def receive() -> Sequence[bytes]:
            kinds: list[bytes] = []
            while wire.STOP not in kinds:
                kinds += [kind for kind, _ in agent.receive()]
            return kinds

        kinds = list(await asyncio.to_thread(receive))
        agent.send(wire.PAUSE, b"19")
        await control.changed.wait_until(lambda: ranks.states[1].paused_by == 19, 20)
        return kinds, channel.received - before, len(control.connected)
    finally:
        await control.close()


def test_an_agent_answers_a_probe_and_does_nothing_else_with_it() -> None:
    empty = 5 + 2 * 32  # bytes of a frame without a payload
    assert asyncio.run(_probe_an_agent()) == ([wire.STDIN, wire.STOP], empty + empty + 2, 1)
