"""Scripts for Horovod, run as they are: `hvdrun --alias-horovod` and `import hvdkit.alias_horovod`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engines import require_horovod
from refused import refused

from hvdkit.aliasing.keras2 import models, modules, optimizers
from hvdkit.aliasing.names import CALLS, MODULES, REFUSED, refusal
from hvdkit.aliasing.tensorflow1 import REFUSED as TF1
from hvdkit.aliasing.tensorflow1 import explain
from hvdkit.launch.run_api import make_options

ROOT = str(Path(__file__).parents[2])


def environment(**variables: str) -> dict[str, str]:
    path = [ROOT, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "KERAS_BACKEND": "tensorflow"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(path), **variables}


def run_python(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(**variables), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(tmp_path: Path, script: str, *options: str, **variables: str) -> str:
    """What two ranks of hvdrun --alias-horovod print, stderr too."""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "hvdkit.launch", "--alias-horovod", "-np", "2", *options]
    done = subprocess.run(
        [*command, sys.executable, "script.py"],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("theirs", MODULES)
def test_every_module_that_is_promised_is_there(theirs: str) -> None:
    package = MODULES[theirs].partition(".")[0]
    folder = Path(ROOT, "packages", package.removeprefix("hvdkit_")) if package != "hvdkit" else Path(ROOT)
    place = folder.joinpath(*MODULES[theirs].replace("tensorflow.keras", "keras").split("."))
    assert place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


@pytest.mark.parametrize("name", [*REFUSED, "horovod.spark.lightning.estimator", "horovod.torch.nonsense"])
def test_what_is_refused_is_named_with_the_way_round(name: str) -> None:
    said = refusal(name)
    assert said.startswith(f"{name} is not in hvdkit") and said.endswith(".") and len(said) > 80
    assert not refusal("horovod.torch.mpi_ops")


def test_names_of_tensorflow_1_say_what_to_write() -> None:
    for name in TF1:
        assert explain(name).startswith(f"tf.{name} belongs to TensorFlow 1") and ": " in explain(name)
    assert not explain("constant") and all(CALLS.values())


def test_the_alias_brings_in_no_framework_and_gives_the_modules_themselves() -> None:
    code = """
import sys, hvdkit.alias_horovod
import horovod, horovod.common.util
assert not {"torch", "tensorflow", "keras", "jax", "mpi4py"} & set(sys.modules)
from horovod.common.exceptions import HorovodInternalError
import hvdkit.common.exceptions, hvdkit.common.util
assert HorovodInternalError is hvdkit.common.exceptions.HorovodInternalError
assert horovod.common.util is hvdkit.common.util and horovod.__version__ == "0.28.1"
assert horovod.__file__ == hvdkit.__file__
assert hvdkit.common.util.__spec__.name == "hvdkit.common.util"
import horovod.torch as hvd, horovod.torch.mpi_ops, hvdkit.torch
assert hvd is hvdkit.torch and horovod.torch.mpi_ops is hvdkit.torch.mpi_ops and "tensorflow" not in sys.modules
import torch
hvd.init()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1))
assert str(type(optimizer)) == "<class 'horovod.torch.optimizer.SGD'>"  # as in Horovod; Lightning 1 looks for it
from horovod.torch.elastic import run
from horovod.run import run
import horovod.run
assert callable(horovod.run) and horovod.run.run is run
for use in ("import horovod.mxnet", "horovod.data", "from horovod.spark.lightning import TorchEstimator",
            "import horovod.runner.launch", "from horovod.runner.common.util import secret"):
    try:
        exec(use)
    except (ImportError, AttributeError) as error:
        print(error)
    else:
        raise AssertionError(use)
"""
    said = run_python(code).splitlines()
    assert [line.split()[0] for line in said] == [
        "horovod.mxnet",
        "horovod.data",
        "horovod.spark.lightning",
        "horovod.runner.launch",
        "horovod.runner.common",
    ]


def test_horovod_imported_before_is_an_error_that_says_where_from(tmp_path: Path) -> None:
    (tmp_path / "horovod.py").touch()
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import horovod
try:
    import hvdkit.alias_horovod
except ImportError as error:
    print(error)
"""
    said = run_python(code)
    assert str(tmp_path) in said and "hvdrun --alias-horovod" in said


def test_horovod_is_shadowed_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "horovod.py").write_text("real = True")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import hvdkit, horovod; print(horovod.real)"
    assert run_python(code).strip() == "True"


def test_the_options_of_horovods_run_are_those_of_launch() -> None:
    given = {"hosts": "a:1", "start_timeout": 30, "verbose": None, "cooldown_range": [1, 5], "min_num_proc": 2}
    options = make_options(3, given)
    assert (options.np, options.hosts, options.start_timeout, options.min_np) == (3, "a:1", 30, 2)
    assert options.blacklist_cooldown_range == (1, 5)
    assert make_options(1, {"network_interfaces": ["ib0", "ib1"]}).network_interfaces == "ib0,ib1"
    with refused("option-unknown", names=["run(nonsense="]):
        make_options(1, {"nonsense": 1})


TORCH = """
import sys, warnings
import torch
import horovod
import horovod.torch as hvd
from horovod.torch.mpi_ops import allreduce_async_, synchronize
from horovod.torch.compression import Compression

def train(seed):
    hvd.init()
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=Compression.none, op=hvd.Average,
        gradient_predivide_factor=1.0)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.full((2, 4), float(hvd.rank() + step))
        loss = (model(x) - 1).pow(2).mean()
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.set_backward_passes_per_step(2)
    optimizer.zero_grad()
    for half in range(2):
        model(x).sum().backward()
    optimizer.step()
    tensor = torch.tensor(float(hvd.rank()))
    synchronize(allreduce_async_(tensor, name="t", op=hvd.Sum))
    epoch = hvd.broadcast(torch.tensor(hvd.rank() + 7), root_rank=0, name="epoch").item()
    hvd.nccl_built(), hvd.mpi_threads_supported(), hvd.is_homogeneous()
    return hvd.rank(), hvd.size(), tensor.item(), epoch, model.weight.sum().item()

@hvd.elastic.run
def elastic(state):
    for state.epoch in range(state.epoch, 2):
        state.commit()
    return state.epoch

if __name__ == "__main__":
    if horovod.torch.mpi_ops.__name__ and "again" not in sys.argv:
        rank, size, total, epoch, weights = train(1)
        assert (size, total, epoch) == (2, 1.0, 7)
        model = torch.nn.Linear(1, 1)
        assert elastic(hvd.elastic.TorchState(model=model, epoch=0)) == 1
        if rank == 0:
            hvd.shutdown()
            sys.argv.append("again")
            results = horovod.run(train, args=(1,), np=2, use_mpi=True)
            assert [one[:4] for one in results] == [(0, 2, 1.0, 7), (1, 2, 1.0, 7)], results
            assert all(abs(one[4] - weights) < 1e-6 for one in results), (results, weights)
            print("same weights")
        else:
            hvd.shutdown()
"""


@pytest.mark.ranks
def test_a_script_for_pytorch_and_horovod_run(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    assert "[0] same weights" in run_script(tmp_path, TORCH)


@pytest.mark.horovod_core
@pytest.mark.ranks
def test_the_engine_has_the_real_horovod_where_the_script_has_the_alias(tmp_path: Path) -> None:
    require_horovod()
    script = """
import horovod.torch as hvd, horovod
import torch
hvd.init()
assert hvd.__name__ == "hvdkit.torch" and horovod.hvdkit_alias
assert hvd.allreduce(torch.tensor(float(hvd.rank()))).item() == 0.5
import hvdkit.engine.runtime as runtime, sys
real = runtime.runtime("").provider.binding
assert type(real.basics).__module__.startswith("horovod.")
import horovod.torch.mpi_ops
assert horovod.torch.mpi_ops.__name__ == "hvdkit.torch.mpi_ops"
print("both")
"""
    assert run_script(tmp_path, script, "--engine", "horovod").count("both") == 2


KERAS = """
import warnings; warnings.simplefilter("ignore")
import os
import horovod
import numpy as np
import tensorflow as tf
import keras
from keras import backend as K
from keras.layers.advanced_activations import LeakyReLU
from keras.preprocessing.image import ImageDataGenerator
from keras.utils import np_utils
from tensorflow.compat.v1.keras.backend import set_session
from tensorflow.keras.optimizers.legacy import Adam
import tensorflow.keras as tfk
import horovod.tensorflow.keras as hvd

hvd.init()
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.Session(config=config))
assert horovod.tensorflow.keras is hvd
labels = np_utils.to_categorical(np.arange(20) % 2, 2)
images = np.random.RandomState(hvd.rank()).rand(20, 4, 4, 1).astype("float32")
model = tfk.Sequential([tfk.layers.Input((4, 4, 1)), tfk.layers.Flatten(), tfk.layers.Dense(3), LeakyReLU(0.1),
                        tfk.layers.Dense(2, activation="softmax")])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(lr=0.1, decay=0.5, momentum=0.9))
model.compile(loss="categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"],
              experimental_run_tf_function=False)
steps, rates = [], []

class Halve(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        steps.append(0)
    def on_train_batch_end(self, batch, logs=None):
        steps[-1] += 1
    def on_epoch_end(self, epoch, logs=None):
        rates.append(float(K.get_value(self.model.optimizer.lr)))
        K.set_value(self.model.optimizer.lr, rates[-1] / 2)

flow = ImageDataGenerator(rotation_range=5).flow(images, labels, batch_size=5)
model.fit_generator(flow, steps_per_epoch=20 / 5 * 0.75, epochs=3, verbose=0, workers=1, callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), Halve(),
    hvd.callbacks.LearningRateScheduleCallback(multiplier=1.0, end_epoch=1),
    keras.callbacks.ModelCheckpoint("weights%d-{epoch}.h5" % hvd.rank(), save_weights_only=True, period=2)],
    validation_data=flow, validation_steps=6)
assert steps == [3, 3, 3] and np.allclose(rates, [0.1, 0.05, 0.025]), (steps, rates)
# Keras 2's rule: the rate over 1 + decay * iterations
assert np.allclose(float(optimizer._decayed_lr("float32")), 0.0125 / (1 + 0.5 * 9))
assert os.path.exists("weights%d-2.h5" % hvd.rank()) and not os.path.exists("weights%d-1.h5" % hvd.rank())
assert len(optimizer.variables()) == len(optimizer.get_weights()) and len(optimizer.variables) > 3
optimizer.set_weights(optimizer.get_weights())
model.load_weights("weights%d-2.h5" % hvd.rank())
model.reset_states()
assert model.metrics_names == ["loss", "accuracy"]
assert model.evaluate_generator(flow, steps=2)[0] > 0 and model.predict_classes(images).shape == (20,)
model.save("model%d" % hvd.rank())
again = hvd.load_model("model%d" % hvd.rank())
assert np.allclose(again.predict(images, verbose=0), model.predict(images, verbose=0))
again.compile("sgd", tfk.losses.CategoricalCrossentropy(reduction=tf.keras.losses.Reduction.AUTO), metrics=["mse"])
assert keras.losses.Reduction.AUTO == "sum_over_batch_size" and again.evaluate(images, labels, verbose=0)[0] > 0
for root in (keras, tf.keras, tfk):
    for module in (root.losses, root.metrics):
        for name in ("mean_squared_error", "mse", "MSE", "mean_absolute_error", "kl_divergence", "kld", "log_cosh"):
            assert np.isfinite(getattr(module, name)(labels, labels)).all(), (module, name)
    assert np.allclose(root.losses.cosine_proximity(labels, labels), -1.0)
again.compile("sgd", "mse", ["mae"], [1.0])
assert len(again.evaluate(images, labels, verbose=0)) == 2
again.compile("sgd", "mse", "mae")
assert len(again.evaluate(images, labels, verbose=0)) == 2
again.compile(keras.optimizers.SGD(lr=0.1, decay=0.5, momentum=0.9), "mse")
again.fit(images, labels, batch_size=5, epochs=1, shuffle=False, verbose=0)
again.save("whole%d.h5" % hvd.rank())
whole, plain = hvd.load_model("whole%d.h5" % hvd.rank()), tfk.models.load_model("whole%d.h5" % hvd.rank())
for one in (again, plain):  # alone, as from Keras 2's load_model
    one.fit(images, labels, batch_size=5, epochs=1, shuffle=False, verbose=0)
assert np.allclose(again.predict(images, verbose=0), plain.predict(images, verbose=0), atol=1e-6)
assert float(plain.optimizer._decayed_lr("float32")) == float(again.optimizer._decayed_lr("float32"))
assert [float(np.sum(one)) for one in whole.optimizer.get_weights()][0] == 4
hvd.broadcast_model(whole)
whole.fit(images, labels, batch_size=5, epochs=1, shuffle=False, verbose=0)
assert int(whole.optimizer.iterations) == 8

def scale(x):
    return x * 1.5

small = keras.Sequential([keras.Input((2,)), keras.layers.Lambda(scale)])
for path in ("scale%d.h5", "scale%d.keras"):  # found by its module, which is imported
    small.save(path % hvd.rank())
    assert np.allclose(tfk.models.load_model(path % hvd.rank(), compile=False)(np.ones((1, 2))), 1.5)
config = small.layers[0].get_config()
for module, name in (("os.path", "join"), ("os", "system"), ("nothing", "scale")):
    config["function"] = {**config["function"], "module": module, "config": name}
    try:
        keras.layers.Lambda.from_config(config)
    except TypeError as error:
        assert "Could not locate function" in str(error), error
    else:
        raise AssertionError((module, name))
assert float(Adam(lr=1).lr) == 1.0 and type(Adam()) is keras.optimizers.Adam
set_session(tf.Session())
tf.compat.v1.keras.backend.set_session(tf.compat.v1.Session(config=tf.compat.v1.ConfigProto()))
tf.set_random_seed(1)
for use in (lambda: tf.placeholder(tf.float32), lambda: tf.Session().run(0), lambda: tf.train.AdamOptimizer(1.0),
            lambda: horovod.tensorflow.broadcast_global_variables(0), lambda: tf.compat.v1.Session().run(0)):
    try:
        use()
    except (AttributeError, ImportError, RuntimeError) as error:
        print("refused:", error)
    else:
        raise AssertionError(use)

ins = [keras.Input((2,)), keras.Input((2,))]
both = keras.Model(ins, keras.layers.Dense(1)(keras.layers.Add()(ins)))
both.compile("sgd", "mse")
batch = [np.ones((4, 2), "float32")] * 2, np.ones((4, 1), "float32")

class Pairs(keras.utils.Sequence):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return batch

for data in (Pairs(), (batch for _ in range(2))):
    both.fit(data, steps_per_epoch=2, verbose=0)
rate, weight = tf.Variable(0.5), tf.Variable(1.0)
one = hvd.DistributedOptimizer(tfk.optimizers.SGD(learning_rate=rate))
step = tf.function(lambda: one.apply_gradients([(tf.constant(1.0), weight)]))
step()
rate.assign(0.25)
step()
assert float(weight) == 0.25 and float(one.lr) == 0.25
one.lr = 0.125
saved = tf.train.Checkpoint(optimizer=one).save("rate%d" % hvd.rank())
rate.assign(1.0)
tf.train.Checkpoint(optimizer=one).restore(saved)
assert float(rate) == 0.125 and float(keras.optimizers.Adam(keras.Variable(0.5)).learning_rate) == 0.5

@hvd.elastic.run
def train(state):
    return state.epoch

assert train(hvd.elastic.KerasState(model, epoch=4)) == 4
print("done", hvd.cuda_built())
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_habits_of_keras_2_with_one_warning_each(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    said = run_script(tmp_path, KERAS)
    assert said.count("done False") == 2 and said.count("refused:") == 10
    assert "[1] [hvdkit" not in said
    for habit in (
        "experimental_run_tf_function",
        "lr= was renamed",
        "optimizer.lr was renamed",
        "hvdkit calls model.fit() instead",
    ):
        assert said.count(habit) == 1, said


def test_arguments_of_keras_2_become_todays() -> None:
    assert models.translate("fit", {"steps_per_epoch": 62.5, "workers": 4, "nb_epoch": 2, "verbose": 0}) == {
        "steps_per_epoch": 62,
        "epochs": 2,
        "verbose": 0,
    }
    assert models.translate("fit", {"initial_epoch": np.array(3), "validation_freq": [1, 5]}) == {
        "initial_epoch": 3,
        "validation_freq": [1, 5],
    }
    assert optimizers.translate(0.1, {"lr": 1, "decay": 0.5, "momentum": 0.9}) == (1.0, {"momentum": 0.9}, 0.5)
    assert optimizers.translate(np.float32(0.5), {"decay": 0.0, "schedule_decay": 0.004}) == (0.5, {}, 0.0)
    schedule = object()
    assert optimizers.translate(schedule, {}) == (schedule, {}, 0.0)


def test_the_old_paths_of_keras_lead_somewhere() -> None:
    assert all(old.count(".") <= 2 and place.strip() == place for old, place in modules.OLD.items())
    assert set(modules.parents()) == {
        "", "backend", "callbacks", "initializers", "layers", "mixed_precision", "optimizers", "preprocessing", "utils",
    }  # fmt: skip


SESSIONS = """
import tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
import horovod.tensorflow as hvd

hvd.init()
class Session(tf.Session):
    pass
x = tf.placeholder(tf.float32, [])
weight = tf.get_variable("weight", initializer=float(hvd.rank() + 1))
train = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.5)).minimize(x * weight)
with Session(config=tf.ConfigProto()) as session:
    assert isinstance(session, tf.Session)
    session.run(tf.global_variables_initializer())
    session.run(hvd.broadcast_global_variables(0))
    session.run(train, {x: 1.0 + 2 * hvd.rank()})
    print("weight", session.run(weight))
import keras
try:
    keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)]).compile("sgd", "mse")
except RuntimeError as error:
    print("refused:", error)
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_script_with_graphs_and_sessions_and_without_keras(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    said = run_script(tmp_path, SESSIONS)
    assert said.count("weight 0.0") == 2 and said.count("Keras 3 needs eager execution") == 2, said
