"""TensorFlow 1's names in `tf`: names that still work resolve; names of sessions and graphs raise an error.

Sessions and graphs of tf.compat.v1 are unchanged. Keras 3 does not work in them, see check_eager().
Experimental, like the patches of Keras: it adds names to the module tensorflow.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, NoReturn

from hvdkit.aliasing.said import warn_once

_WITHOUT_KERAS = (
    "If the script does not use Keras, it can keep its graphs: `import tensorflow.compat.v1 as tf; "
    "tf.disable_v2_behavior()`."
)
_LOOP = "write the training step with tf.GradientTape and hvd.DistributedGradientTape, or use Keras's fit()"

_EAGER = f"there is no graph to run, as TensorFlow 2 executes eagerly; {_LOOP}. {_WITHOUT_KERAS}"

#: Names of `tf`, also with dots -> the replacement to write.
REFUSED = {
    "placeholder": "pass tensors to a function that is decorated with @tf.function",
    "variable_scope": "create variables with tf.Variable or Keras layers",
    "get_variable": "create variables with tf.Variable or Keras layers",
    "global_variables_initializer": "variables are initialized when they are created; remove the call",
    "InteractiveSession": _LOOP,
    "layers": (
        "use keras.layers. A script that does not use Keras can keep its graphs and tf.layers: "
        "`import tensorflow.compat.v1 as tf; tf.disable_v2_behavior()`, with the package tf_keras installed and "
        "TF_USE_LEGACY_KERAS=1 set"
    ),
    "contrib": "most of it has moved to keras or tf.data",
    "estimator": "use keras.Model and fit()",
    "disable_eager_execution": "remove the call",
    "disable_v2_behavior": "remove the call",
    "train.MonitoredTrainingSession": _LOOP,
    "train.SessionRunHook": _LOOP,
    "train.StopAtStepHook": _LOOP,
    "train.LoggingTensorHook": _LOOP,
    "train.Supervisor": _LOOP,
    "train.get_or_create_global_step": "count steps in the training loop, or use optimizer.iterations",
    "train.get_global_step": "count steps in the training loop, or use optimizer.iterations",
    "train.Saver": "use tf.train.Checkpoint, or model.save()",
    "train.AdamOptimizer": "use keras.optimizers.Adam",
    "train.GradientDescentOptimizer": "use keras.optimizers.SGD",
    "train.MomentumOptimizer": "use keras.optimizers.SGD(momentum=...)",
    "train.RMSPropOptimizer": "use keras.optimizers.RMSprop",
    "train.AdagradOptimizer": "use keras.optimizers.Adagrad",
}

#: Names that are looked up in tf.compat.v1, where they work without a graph.
_STILL_THERE = """
ConfigProto GPUOptions logging app flags gfile set_random_seed get_default_graph reset_default_graph to_float to_int32
to_int64 log ceil div mod diag is_nan string_to_number parse_single_example FixedLenFeature read_file decode_raw
AUTO_REUSE assign Print summary_v1 OptimizerOptions random_normal random_uniform truncated_normal enable_eager_execution
FixedLenSequenceFeature VarLenFeature python_io trainable_variables global_variables matrix_inverse log1p
""".split()

#: Names of REFUSED that are not in tf.compat.v1 either, or not without Keras 2.
_NOWHERE = ("layers", "contrib", "estimator")


def apply(tf: ModuleType) -> None:
    """Make TensorFlow 2 find these names, or raise an error that names the replacement."""
    if not tf.__version__.startswith("2."):
        return
    _replace(tf, "Session", _Session)
    _replace(tf.compat.v1, "Session", _session_class(tf))
    _look_further(tf, "")
    _look_further(tf.train, "train.")
    _look_further(tf.random, "random.")
    _replace(tf.compat.v1, "keras", _V1Keras("tensorflow.compat.v1.keras"))


def _replace(module: Any, name: str, value: Any) -> None:
    """Set an attribute of one of TensorFlow's modules; some modules cache attributes that were looked up."""
    setattr(module, name, value)
    kept = getattr(module, "_fastdict_key_in", None)
    if kept is not None and kept(name):
        module._fastdict_pop(name)


class _V1Keras(ModuleType):
    """tf.compat.v1.keras: Keras 3, whose backend has set_session."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module("keras._tf_keras.keras"), name)


def explain(name: str) -> str:
    """Return the error message for a name that TensorFlow 1 had in `tf`; "" for a name that is not in REFUSED."""
    way = REFUSED.get(name)
    if not way:
        return ""
    said = f"tf.{name} belongs to TensorFlow 1 and its graphs, which Keras 3 does not support: {way}."
    return said if name in _NOWHERE else f"{said} {_WITHOUT_KERAS}"


def check_eager(call: str) -> None:
    """Raise RuntimeError if a script uses Keras 3 while eager execution is disabled."""
    tf = sys.modules.get("tensorflow")
    if tf is not None and not tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            f"{call} was called in a graph of TensorFlow 1, or after tf.compat.v1.disable_eager_execution() or "
            f"disable_v2_behavior(). Keras 3 needs eager execution: remove these calls and tf.Graph()."
        )


def _look_further(module: ModuleType, prefix: str) -> None:
    own = vars(module).get("__getattr__")

    def find(name: str) -> Any:
        problem = explain(prefix + name)
        if problem:
            raise AttributeError(problem)
        if own is not None:
            return own(name)
        tf = importlib.import_module("tensorflow")
        if prefix == "random." and name == "set_random_seed":
            return tf.random.set_seed
        if not prefix and name in _STILL_THERE and hasattr(tf.compat.v1, name):
            warn_once(f"tf.{name} is a name of TensorFlow 1; hvdkit uses tf.compat.v1.{name} instead.")
            if name == "set_random_seed":
                return tf.random.set_seed
            return getattr(tf.compat.v1, name)
        raise AttributeError(f"module '{module.__name__}' has no attribute {name!r}")

    module.__getattr__ = find  # type: ignore[method-assign]


def _session_class(tf: ModuleType) -> Any:
    """Make tf.compat.v1.Session: TensorFlow's class if a graph exists to run, else _Session."""
    own: Any = tf.compat.v1.Session

    class Kind(type(own)):  # type: ignore[misc]
        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, own) if cls is session else type.__instancecheck__(cls, one)

    def create(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is session and not (args[1:2] or kwargs.get("graph")) and tf.executing_eagerly():
            return _Session(*args, **kwargs)  # no object of the class, so that its __init__() is not called
        return object.__new__(cls)

    session: Any = Kind("Session", (own,), {"__new__": create, "__module__": own.__module__, "__doc__": own.__doc__})
    return session


class _Session:
    """tf.Session for scripts that create a session only for K.set_session: it keeps the configuration."""

    def __init__(self, target: Any = "", graph: Any = None, config: Any = None) -> None:
        self.config = config

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"tf.Session.{name}: {_EAGER}")

    def __enter__(self) -> NoReturn:
        raise RuntimeError(f"with tf.Session(): {_EAGER}")

    def __exit__(self, *_: object) -> None: ...


def get_session() -> _Session:
    """K.get_session: return a session without a configuration."""
    return _Session()


def set_session(session: Any) -> None:
    """K.set_session: apply the GPU and thread options of the session's configuration, its usual purpose."""
    tf = importlib.import_module("tensorflow")
    config = getattr(session, "config", None)
    warn_once("K.set_session() was removed in Keras 3; hvdkit applies the GPU and thread options of its configuration.")
    if config is None:
        return
    gpus = tf.config.list_physical_devices("GPU")
    try:
        if gpus and config.gpu_options.visible_device_list:
            chosen = [gpus[int(one)] for one in config.gpu_options.visible_device_list.split(",")]
            tf.config.set_visible_devices(chosen, "GPU")
            gpus = chosen
        if config.gpu_options.allow_growth:
            for gpu in gpus:
                tf.config.experimental.set_memory_growth(gpu, True)
        if config.intra_op_parallelism_threads:
            tf.config.threading.set_intra_op_parallelism_threads(config.intra_op_parallelism_threads)
        if config.inter_op_parallelism_threads:
            tf.config.threading.set_inter_op_parallelism_threads(config.inter_op_parallelism_threads)
    except RuntimeError as error:  # TensorFlow is initialized already
        warn_once(f"K.set_session() was called after TensorFlow had started, so its configuration is ignored: {error}")
