"""What the scaling model is drawn for: gradients of known sizes, wires, Horovod's ring, and what others published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from hvdkit.config import Config
from hvdkit.profiling.prediction import Cluster, Prediction, Work, predict_scaling
from hvdkit.tools.charts import build_page, draw_lines, embed, label_log_axis, new_figure
from hvdkit.transport.between.select import Link

GIGABITS = (1, 10, 100, 400)
HOSTS = [2**power for power in range(13)]
_HOROVOD_BYTES = 64 * 2**20  # its HOROVOD_FUSION_THRESHOLD unless set
_BACKWARD = 2 / 3


@dataclass(frozen=True)
class Drawn:
    """A model in training, one rank a host. of: where its numbers come from. nbytes: of gradients in float32."""

    name: str
    of: str
    nbytes: float
    compute_s: float
    bucket_bytes: int = Config().fusion_bytes

    @property
    def work(self) -> Work:
        """For the prediction."""
        whole, rest = divmod(self.nbytes, self.bucket_bytes)
        buckets = [float(self.bucket_bytes)] * int(whole) + [rest] * (rest > 0)
        return Work(self.compute_s, _BACKWARD * self.compute_s, buckets)


#: Parameters are counted; seconds of compute, but for the first which is measured, are assumptions.
DRAWN = (
    Drawn("MLP, 8 x 1024x1024", "33.6 MB of gradients, compute as measured here", 4 * 8 * 1024 * 1025, 0.046),
    Drawn("ResNet-50", "25.6 M parameters, assumed: 150 ms of compute", 4 * 25_557_032, 0.150),
    Drawn("GPT-2 small", "124 M parameters, assumed: 500 ms of compute", 4 * 124_439_808, 0.500),
)


@dataclass(frozen=True)
class Reference:
    """A published scaling efficiency. hosts: servers, of several GPUs each."""

    name: str
    hosts: int
    efficiency: float
    text: str
    source: str


_HOROVOD = "Horovod's docs/benchmarks.rst"
REFERENCES = (
    Reference(
        "Horovod, ResNet-101",
        128,
        0.90,
        "Horovod, Inception V3 and ResNet-101, 128 servers of 4 Pascal GPUs, 25 Gbit/s RoCE",
        _HOROVOD,
    ),
    Reference("Horovod, VGG-16", 128, 0.68, "Horovod, VGG-16, the same servers", _HOROVOD),
    Reference(
        "DeepLabv3+ on Summit",
        4560,
        0.907,
        "DeepLabv3+ on Summit, 27360 V100 GPUs, 6 a node, float32",
        'Kurth et al., "Exascale Deep Learning for Climate Analytics", SC18',
    ),
)


def horovod(drawn: Drawn) -> Drawn:
    """The same in buckets as Horovod fills them."""
    return replace(drawn, bucket_bytes=_HOROVOD_BYTES)


def on_wire(cluster: Cluster, gigabits: float) -> Cluster:
    """The cluster with wires of another rate: nothing else changes."""
    link = cluster.link
    return replace(cluster, link=Link(link.latency_s, 8e-9 / gigabits, link.message_s))


def predict_drawn(drawn: Drawn, cluster: Cluster, gigabits: float, hosts: Sequence[int]) -> list[Prediction]:
    """The step on each number of hosts."""
    return predict_scaling(drawn.work, on_wire(cluster, gigabits), hosts)


def draw_page(drawn: Sequence[Drawn], cluster: Cluster, fitted: str, where: str) -> str:
    """A page with a chart of efficiency and one of step time for each work."""
    parts = [f"<p>Fitted on {where}: {fitted}. One rank a host.</p>"]
    for one in drawn:
        parts.append(f"<h2>{one.name}</h2><p>{one.of}; dashed: Horovod's ring by the same model, or published.</p>")
        parts.append(_draw(one, cluster, "efficiency", "efficiency", _published(one)))
        parts.append(_draw(one, cluster, "step_s", "seconds a step", {}))
    rows = [[one.text, str(one.hosts), f"{one.efficiency:.1%}", one.source] for one in REFERENCES]
    parts.append("<h2>Published</h2>" + build_table(["what", "hosts", "efficiency", "source"], rows))
    return build_page("How training scales", parts)


def _draw(
    drawn: Drawn, cluster: Cluster, what: str, label: str, published: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    lines: dict[str, Sequence[tuple[float, float]]] = {}
    for gigabits in GIGABITS:
        found = predict_drawn(drawn, cluster, gigabits, HOSTS)
        lines[f"{gigabits} Gbit/s"] = [(one.hosts, getattr(one, what)) for one in found]
    ring = predict_drawn(horovod(drawn), replace(cluster, algorithm="ring"), GIGABITS[2], HOSTS)
    name = f"Horovod's ring, {GIGABITS[2]} Gbit/s"
    lines[name] = [(one.hosts, getattr(one, what)) for one in ring]
    figure = new_figure("benchmarks.scaling_model --html", 10, 5)
    axis = figure.subplots()
    draw_lines(axis, {**lines, **published}, dashed=[name, *published])
    label_log_axis(axis, HOSTS[::2])
    axis.set(xlabel="hosts", ylabel=label, yscale="log" if what == "step_s" else "linear")
    return embed(figure)


def _published(drawn: Drawn) -> dict[str, Sequence[tuple[float, float]]]:
    """Beside the convolutional network, which is what they are nearest to."""
    if drawn.name != "ResNet-50":
        return {}
    return {one.name: [(one.hosts, one.efficiency)] for one in REFERENCES}


def build_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Build an HTML table of plain text."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"
