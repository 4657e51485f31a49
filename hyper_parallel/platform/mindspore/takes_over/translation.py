"""From MindSpore's operators to neutral ones: what arrives at ``__fallback__``, in the words of the rule table.

One operator of the table has up to five names in MindSpore (``Add``, ``AddExt``, ``AddScalar``, ...). Three kinds:

* ``SAME``: the arguments agree with the rules'. The operator is passed on as it came, so blocks run the very kernel
  that the plain call would.
* ``TRANSLATED``: the arguments are put into the rules' words for a neutral operator of ``operators/``.
* ``COMPOSED``: written in terms of other operators, which are dispatched one by one.

What has no entry is gathered, as everything without a rule is.

Note [Old primitives]
Primitives of the older kind arrive as (primitive, its name, its arguments), and carry part of their settings (strides,
axes) as attributes. Passed on, they are one operator per name for the look-up of plans, whose key does not have the
attributes; so only those without influence on layouts may be passed on, and all others are translated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.start import on_ascend
from hyper_parallel.platform.mindspore.operators.all_operators import NEUTRAL

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_by_names = {
    "abs": "Abs",
    "acos": "AcosExt ACos",
    "acosh": "AcoshExt Acosh",
    "add": "AddExt Add AddScalar",
    "addcdiv": "AddcdivExt Addcdiv",
    "addcmul": "AddcmulExt Addcmul",
    "asin": "AsinExt Asin",
    "asinh": "AsinhExt Asinh",
    "atan": "AtanExt Atan",
    "atan2": "Atan2Ext Atan2",
    "angle": "Angle",
    "atanh": "Atanh",
    "avg_pool2d": "AvgPool",
    "bitwise_and": "BitwiseAndTensor BitwiseAndScalar BitwiseAnd",
    "bitwise_not": "BitwiseNot Invert",
    "bitwise_or": "BitwiseOrTensor BitwiseOrScalar BitwiseOr",
    "bitwise_xor": "BitwiseXorTensor BitwiseXorScalar BitwiseXor",
    "ceil": "Ceil",
    "celu": "CeLU",
    "clamp": "ClampScalar ClampTensor",
    "cos": "Cos",
    "cosh": "Cosh",
    "digamma": "Digamma",
    "div": "Div Divs RealDiv",
    "elu": "EluExt Elu",
    "eq": "Equal EqualScalar",
    "erf": "Erf",
    "erfc": "Erfc",
    "erfinv": "Erfinv",
    "exp": "Exp",
    "exp2": "Exp2",
    "expm1": "Expm1",
    "floor": "Floor",
    "floor_divide": "FloorDiv FloorDivScalar DivMod DivMods",
    "fmax": "Fmax",
    "fmin": "Fmin",
    "fmod": "FmodTensor FmodScalar Mod",
    "frac": "Frac",
    "gcd": "Gcd",
    "ge": "GreaterEqual GreaterEqualScalar",
    "gelu": "GeluExt GeLU",
    "gt": "Greater GreaterScalar",
    "hardshrink": "HShrink",
    "hardsigmoid": "HSigmoid",
    "hardswish": "HSwish",
    "hardtanh": "Hardtanh",
    "heaviside": "Heaviside",
    "hypot": "Hypot",
    "i0": "BesselI0",
    "isclose": "IsClose",
    "isfinite": "IsFinite",
    "isinf": "IsInf",
    "isnan": "IsNan",
    "isneginf": "IsNegInf",
    "lcm": "Lcm",
    "le": "LessEqual LessEqualScalar",
    "leaky_relu": "LeakyReLUExt LeakyReLU",
    "lerp": "Lerp LerpScalar",
    "lgamma": "Lgamma",
    "log1p": "Log1p",
    "logaddexp": "LogAddExp",
    "logaddexp2": "LogAddExp2",
    "logical_and": "LogicalAnd",
    "logical_not": "LogicalNot",
    "logical_or": "LogicalOr",
    "logical_xor": "LogicalXor",
    "logit": "Logit",
    "lt": "Less LessScalar",
    "masked_fill": "MaskedFill MaskedFillScalar",
    "maximum": "Maximum",
    "minimum": "Minimum",
    "mul": "Mul Muls",
    "nan_to_num": "NanToNum",
    "ne": "NotEqual NeScalar NotEqualScalar",
    "neg": "Neg",
    "nextafter": "NextAfter",
    "reciprocal": "Reciprocal Inv",
    "relu": "ReLU",
    "relu6": "ReLU6",
    "remainder": "RemainderTensorTensor RemainderTensorScalar RemainderScalarTensor FloorMod",
    "round": "Round",
    "rsqrt": "Rsqrt",
    "selu": "SeLUExt SeLU",
    "sigmoid": "Sigmoid",
    "sign": "Sign",
    "silu": "SiLU",
    "sin": "Sin",
    "sinc": "Sinc",
    "sinh": "Sinh",
    "softshrink": "SoftShrink",
    "sqrt": "Sqrt",
    "square": "Square",
    "sub": "SubExt Sub SubScalar",
    "tan": "Tan",
    "tanh": "Tanh",
    "threshold": "Threshold",
    "trunc": "Trunc",
    "where": "Select",
    "xlogy": "Xlogy XLogYScalarOther XLogYScalarSelf",
    "real": "Real",
    "imag": "Imag",
    "conj": "Conj",
    "complex": "Complex",
    "bitwise_left_shift": "LeftShift",
    "bitwise_right_shift": "RightShift",
    "special_i0e": "BesselI0e",
    "special_i1": "BesselI1",
    "special_i1e": "BesselI1e",
    "special_bessel_j0": "BesselJ0",
    "special_bessel_j1": "BesselJ1",
    "special_zeta": "Zeta",
}
SAME = {ms_name: name for name, ms_names in _by_names.items() for ms_name in ms_names.split()}


class PassedOn(str):
    """An operator of MindSpore whose arguments agree with the rules', under its neutral name.

    A name that can be called: the operator itself is another object at each call and keeps what that call computed for
    backward, so it can be called once and no look-up may know it. Equal names are one operator for the look-ups.
    """

    call: Callable[..., Any]
    shapes: Callable[..., Any] | None = None  # how the shapes of its results follow from its arguments

    @property
    def __name__(self) -> str:
        return str(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def passed_on(name: str, call: Callable[..., Any]) -> PassedOn:
    """``call`` under a neutral name."""
    passed = PassedOn(name)
    passed.call = call
    return passed


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The library's dispatcher, once it is there."""
    raise AssertionError("distributed tensors exist before their dispatcher is set")


TRANSLATED: dict[str, Callable[..., Call]] = {}
COMPOSED: dict[str, Callable[..., Any]] = {}


def neutral_call(func: Any, args: Any, kwargs: Any) -> Call:
    """What arrived at ``__fallback__`` as a call of a neutral operator."""
    kwargs = kwargs or {}
    if args and isinstance(args[0], ops.Primitive):
        return _primitive_call(func, args)
    name = func.name
    same = SAME.get(name)
    if same is not None:
        return passed_on(same, func), tuple(args), kwargs
    translate = TRANSLATED.get(name)
    if translate is not None:
        return translate(*args, **kwargs)
    composed = COMPOSED.get(name)
    if composed is not None:
        return Composed(composed), tuple(args), kwargs
    return passed_on(name, func), tuple(args), kwargs


class Composed:
    """A function that is to be run as it is, on DTensors."""

    __slots__ = ("body",)

    def __init__(self, body: Callable[..., Any]) -> None:
        self.body = body


def _primitive_call(func: Any, args: Any) -> Call:
    primitive, name, given = args[0], args[1], tuple(args[2])
    if name in TRANSLATED:
        return TRANSLATED[name](*given)
    if name in COMPOSED:
        return Composed(COMPOSED[name]), given, {}

    def call(*blocks: Any) -> Any:
        return func(primitive, name, blocks)

    with_attributes = _ATTRIBUTES.get(name)
    if with_attributes is not None:
        return with_attributes(primitive, call, *given)
    return passed_on(SAME.get(name, name), call), given, {}


def _to(neutral: str, *ms_names: str) -> None:
    """These operators of MindSpore take what a neutral one takes, in the same order."""
    function = NEUTRAL[neutral]

    def translate(*args: Any, **kwargs: Any) -> Call:
        return function, args, _renamed(kwargs)

    for ms_name in ms_names:
        TRANSLATED[ms_name] = translate


_SPELLINGS = {"axis": "dim", "keepdims": "keepdim", "keep_dims": "keepdim", "x": "input", "self": "input"}


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    renamed = {_SPELLINGS.get(name, name): value for name, value in kwargs.items()}
    if isinstance(renamed.get("dtype"), int):
        renamed["dtype"] = private_api.dtype_of_id(renamed["dtype"])
    return renamed


def _enters(table: dict[str, Any], *ms_names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        table.update(dict.fromkeys(ms_names, function))
        return function

    return register


_translates, _composes = functools.partial(_enters, TRANSLATED), functools.partial(_enters, COMPOSED)


def _with_dtype(neutral: str, *ms_names: str) -> None:
    """Reductions that end with a dtype, which arrives as a number."""
    function = NEUTRAL[neutral]

    def translate(input: Any, dim: Any = None, keepdim: Any = False, dtype: Any = None, **kwargs: Any) -> Call:
        given = _renamed({"dim": dim, "keepdim": keepdim, "dtype": dtype} | _renamed(kwargs))
        given = {name: value for name, value in given.items() if value is not None and value is not False}
        return function, (input,), given

    for ms_name in ms_names:
        TRANSLATED[ms_name] = translate


_to("log", "Log")
_to("log10", "Log10")
_to("log2", "Log2")
_to("log_sigmoid", "LogSigmoid")
_to("mish", "MishExt", "Mish")
_to("pow", "Pow", "PowTensorScalar", "PowScalarTensor")
_to("softplus", "SoftplusExt", "Softplus")
_with_dtype("sum", "SumExt", "DeprecatedSum")
_with_dtype("mean", "MeanExt", "DeprecatedMean", "ReduceMean")
_with_dtype("prod", "ProdExt", "DeprecatedProd", "ReduceProd")
_with_dtype("max", "Max", "MaxDim")
_with_dtype("min", "Min", "MinDim")
_with_dtype("amax", "ReduceMax", "DeprecatedMax")
_with_dtype("amin", "ReduceMin", "DeprecatedMin")
_with_dtype("any", "Any", "AnyExt", "ReduceAny", "DeprecatedAny")
_with_dtype("all", "All", "AllExt", "ReduceAll", "DeprecatedAll")
_with_dtype("argmax", "ArgMaxExt", "DeprecatedArgmax")
_with_dtype("logsumexp", "LogSumExp", "DeprecatedLogSumExp")


@_translates("ReduceSum")
def _reduce_sum(input: Any, axis: Any = (), keep_dims: bool = False, skip_mode: bool = False) -> Call:
    if skip_mode and isinstance(axis, (tuple, list)) and not axis:
        return NEUTRAL["clone"], (input,), {}
    return TRANSLATED["SumExt"](input, axis, keep_dims)


def _extreme_with_place(neutral: str) -> Callable[..., Any]:
    """These give the places first."""

    def find(input: Any, axis: int = 0, keep_dims: bool = False) -> Any:
        values, places = dispatch(NEUTRAL[neutral], (input, axis, keep_dims), {})
        return places, values

    return find


@_composes("ArgMinExt", "DeprecatedArgmin")
def _argmin_method(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """``x.argmin``, whose places are 32-bit numbers on a CPU."""
    places = dispatch(NEUTRAL["argmin"], (input, dim, keepdim), {})
    return places if on_ascend() else places.to(ms.int32)


def _place_of_extreme(neutral: str) -> Callable[..., Any]:
    def find(input: Any, axis: int = -1, output_type: Any = ms.int32) -> Any:
        dtype = private_api.dtype_of_id(output_type) if isinstance(output_type, int) else output_type
        return dispatch(NEUTRAL[neutral], (input, axis), {}).to(dtype)

    return find


COMPOSED.update(
    {
        "ArgMaxWithValue": _extreme_with_place("max"),
        "ArgMinWithValue": _extreme_with_place("min"),
        "Argmax": _place_of_extreme("argmax"),
        "Argmin": _place_of_extreme("argmin"),
    }
)


@_translates("ReduceStd")
def _reduce_std(input: Any, axis: Any = (), unbiased: bool = True, keep_dims: bool = False) -> Call:
    return NEUTRAL["std_mean"], (input, tuple(axis) or None, unbiased, keep_dims), {}


_DEFAULT_CORRECTION = 1 if on_ascend() else 0  # of the methods; the functions always say it


@_translates("Std", "DeprecatedStd")
def _std(
    input: Any, dim: Any = None, correction: Any = _DEFAULT_CORRECTION, keepdim: bool = False, **kwargs: Any
) -> Call:
    given = {"dim": dim, "keepdim": keepdim} | _renamed(kwargs)
    unbiased = bool(given.pop("unbiased", given.pop("ddof", correction)))
    return NEUTRAL["std"], (input, given["dim"], unbiased, given["keepdim"]), {}


@_translates("Var")
def _var(
    input: Any, dim: Any = None, correction: Any = _DEFAULT_CORRECTION, keepdim: bool = False, **kwargs: Any
) -> Call:
    _, args, _ = _std(input, dim, correction, keepdim, **kwargs)
    return NEUTRAL["var"], args, {}


@_translates("DeprecatedVar")
def _var_of_all(input: Any, axis: Any = None, ddof: int = 0, keepdims: bool = False) -> Call:
    return NEUTRAL["var"], (input, axis, bool(ddof), keepdims), {}


@_translates("CumsumExt", "CumSum")
def _cumsum(input: Any, axis: int, exclusive: Any = False, reverse: Any = False) -> Call:
    if exclusive is True or reverse is True:
        return passed_on("CumSum", lambda x, *rest: ops.CumSum(bool(exclusive), bool(reverse))(x, axis)), (input,), {}
    return NEUTRAL["cumsum"], (input, axis), {}


# ---------------------------------------------------------------- softmax, products


@_translates("Softmax")
def _softmax(input: Any, axis: Any = -1) -> Call:
    axis = axis[0] if isinstance(axis, (tuple, list)) and len(axis) == 1 else axis
    return NEUTRAL["softmax"], (input, axis), {}


@_translates("LogSoftmax", "LogSoftmaxExt")
def _log_softmax(input: Any, axis: Any = -1, dtype: Any = None) -> Call:
    given = _renamed({"dtype": dtype}) if dtype is not None else {}
    return NEUTRAL["log_softmax"], (input, axis), given


_to("matmul", "MatMulExt", "Mm")
_to("bmm", "BatchMatMulExt")
_to("linear", "Dense", "LinearExt")


@_composes("MatMul")
def _matmul(first: Any, second: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    return ops.matmul(
        first.swapaxes(-1, -2) if transpose_a else first, second.swapaxes(-1, -2) if transpose_b else second
    )


COMPOSED["BatchMatMul"] = _matmul


@_composes("BiasAdd")
def _bias_add(input: Any, bias: Any, data_format: Any = 0) -> Any:
    return input + bias.reshape((1, -1, *(1,) * (input.ndim - 2)))


# ---------------------------------------------------------------- shapes

_to("reshape", "Reshape", "View")
_to("flatten", "FlattenExt")
_to("unsqueeze", "ExpandDims", "ExpandDimsView")
_to("squeeze", "Squeeze")
_to("permute", "Transpose", "TransposeView", "DeprecatedTranspose", "Permute")
_to("transpose", "TransposeExtView", "TransposeExt", "SwapAxes")
_to("expand", "BroadcastTo", "BroadcastToView")
_to("cat", "Concat")
_to("stack", "StackExt")
_to("split", "SplitTensor", "SplitTensorView")
_to("split_with_sizes", "SplitWithSize", "SplitWithSizeView")
_to("chunk", "Chunk", "ChunkView")
_to("unbind", "UnstackExtView", "UnstackExt")
_to("narrow", "Narrow", "NarrowView")
_to("flip", "ReverseV2")
_to("tril", "TrilExt")
_to("triu", "Triu", "TriuExt")
_to("diagonal", "Diagonal", "DiagonalExt", "DiagonalView")
_to("tile", "Tile", "Repeat")


@_composes("TExt")
def _t(input: Any) -> Any:
    return ops.transpose(input, (1, 0)) if input.ndim == 2 else input


@_composes("Flatten")
def _flatten(input: Any) -> Any:
    return input.reshape((input.shape[0], -1))


@_translates("Split")
def _split(input: Any, axis: int = 0, output_num: int = 1) -> Call:
    return NEUTRAL["split"], (input, input.shape[axis] // output_num, axis), {}


@_composes("ExpandAs")
def _expand_as(input: Any, other: Any) -> Any:
    return ops.broadcast_to(input, tuple(other.shape))


@_composes("DeprecatedRepeatInterleave", "RepeatInterleaveInt")
def _repeat_interleave(input: Any, repeats: int, dim: Any = None, output_size: Any = None) -> Any:
    return ops.repeat_interleave(input.reshape(-1) if dim is None else input, repeats, 0 if dim is None else dim)


# ---------------------------------------------------------------- positions


@_composes("Gather")
def _gather(input: Any, indices: Any, axis: int = 0, batch_dims: int = 0) -> Any:
    if batch_dims == 0 and input.ndim == 2 and axis == 0:
        return dispatch(NEUTRAL["embedding"], (input, indices), {})
    if batch_dims == 0 and indices.ndim == 1:
        return dispatch(NEUTRAL["index_select"], (input, axis, indices), {})
    return dispatch(passed_on("Gather", lambda x, i: ops.gather(x, i, axis, batch_dims)), (input, indices), {})


@_translates("Embedding")
def _embedding(indices: Any, weight: Any, padding_idx: Any = None, *rest: Any) -> Call:
    return NEUTRAL["embedding"], (weight, indices), {} if padding_idx is None else {"padding_idx": padding_idx}


_to("index_select", "IndexSelect")
_to("gather", "GatherD", "GatherDExt")
_to("sort", "SortExt")
_to("argsort", "ArgSort")
_to("topk", "TopkExt")


@_translates("TopK")
def _topk(input: Any, k: int) -> Call:
    return NEUTRAL["topk"], (input, k), {}


@_translates("OneHot", "OneHotExt")
def _one_hot(input: Any, depth: int, on: Any = None, off: Any = None, axis: int = -1) -> Call:
    if axis not in (-1, input.ndim):
        return passed_on("OneHot", lambda x: ops.one_hot(x, depth, on, off, axis)), (input,), {}
    return passed_on("one_hot", lambda x: ops.one_hot(x, depth, on, off, axis)), (input,), {}


@_composes("Slice")
def _slice(input: Any, begin: Any, size: Any) -> Any:
    ranges = zip(begin, size, input.shape, strict=True)
    return input[tuple(slice(start, whole if length == -1 else start + length) for start, length, whole in ranges)]


_to("take", "Take")


@_composes("StridedSlice")
def _strided_slice(input: Any, begin: Any, end: Any, strides: Any, *masks: int) -> Any:
    begin_mask, end_mask, ellipsis_mask, new_mask, shrink_mask = (*masks, 0, 0, 0, 0, 0)[:5]
    index: list[Any] = []
    for place, (start, stop, step) in enumerate(zip(begin, end, strides, strict=True)):
        bit = 1 << place
        if ellipsis_mask & bit:
            index.append(Ellipsis)
        elif new_mask & bit:
            index.append(None)
        elif shrink_mask & bit:
            index.append(start)
        else:
            index.append(slice(None if begin_mask & bit else start, None if end_mask & bit else stop, step))
    return input[tuple(index)]


# ---------------------------------------------------------------- layers


@_composes("LayerNorm")
def _layer_norm(
    input: Any, weight: Any, bias: Any, begin_norm: int = 1, begin_params: int = 1, eps: float = 1e-7
) -> Any:
    """MindSpore's own gives mean and variance as well, which its layers drop."""
    first = begin_norm % input.ndim
    shape = tuple(input.shape[first:])
    normalised = dispatch(NEUTRAL["layer_norm"], (input, shape, weight, bias, eps), {})
    return normalised, _Unused("LayerNorm", "mean"), _Unused("LayerNorm", "variance")


_to("layer_norm", "LayerNormExt")


@_composes("BatchNorm")
def _batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    is_training: bool = False,
    eps: float = 1e-5,
    momentum: float = 0.1,
    data_format: Any = 0,
) -> Any:
    """MindSpore's own gives the statistics as well, which its layers drop."""
    given = (input, weight, bias, mean, variance, is_training, momentum, eps, False)
    normalised = dispatch(NEUTRAL["batch_norm"], given, {})
    return normalised, *(_Unused("BatchNorm", "statistics") for _ in range(4))


class _Unused:
    """A result that MindSpore's operator has and nobody uses; an error for those who do."""

    def __init__(self, op: str, name: str) -> None:
        self._what = f"the {name} that {op} returns"

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{self._what} is not there for distributed tensors; compute it with mean() and var()")


@_composes("Dropout")
def _dropout(input: Any, keep_prob: float = 0.5, seed0: int = 0, seed1: int = 0) -> Any:
    return dispatch(RANDOM["dropout"], (input, 1.0 - keep_prob), {}), _Unused("Dropout", "mask")


@_composes("DropoutExt", "FuncDropoutExt")
def _dropout_ext(input: Any, p: float = 0.5, training: Any = True, *rest: Any) -> Any:
    return dispatch(RANDOM["dropout"], (input, p, training is not False), {})


@_composes("InplaceNormal")
def _normal_(input: Any, mean: float = 0.0, std: float = 1.0, *state: Any) -> Any:
    return dispatch(RANDOM["normal_"], (input, mean, std), {})


@_composes("InplaceUniform")
def _uniform_(input: Any, low: float = 0.0, high: float = 1.0, *state: Any) -> Any:
    return dispatch(RANDOM["uniform_"], (input, low, high), {})


def _random(name: str) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{name} is answered by the library")

    draw.__name__ = name
    return draw


RANDOM = {name: _random(name) for name in ("dropout", "normal_", "uniform_", "rand_like", "randn_like", "bernoulli_")}


# ---------------------------------------------------------------- dtypes, copies, writing


@_composes("ToDtype", "Cast")
def _cast(input: Any, dtype: Any, *rest: Any) -> Any:
    return input.to(private_api.dtype_of_id(dtype) if isinstance(dtype, int) else dtype)


_to("zeros_like", "ZerosLike", "ZerosLikeExt")
_to("ones_like", "OnesLike", "OnesLikeExt")
_to("full_like", "FullLike")
_to("clone", "Clone")
_to("detach", "StopGradient")
_to("copy_", "InplaceCopy")
_to("add_", "InplaceAddExt", "InplaceAddsExt")
_to("sub_", "InplaceSubExt", "InplaceSubScalar")
_to("mul_", "InplaceMul", "InplaceMuls")
_to("div_", "InplaceDiv", "InplaceDivs")
_to("exp_", "InplaceExp")
_to("relu_", "InplaceReLU")
_to("zero_", "InplaceZero")
_to("fill_", "InplaceFillScalar", "InplaceFillTensor")
_to("masked_fill_", "InplaceMaskedFillScalar", "InplaceMaskedFillTensor")
_to("clamp_", "InplaceClampScalar", "InplaceClampTensor")


def _assign(name: str) -> Callable[..., Any]:
    """MindSpore's optimizers write by these; they are never recorded."""

    def write(tensor: Any, value: Any) -> Any:
        with private_api.no_grad():
            return dispatch(NEUTRAL[name], (tensor, value), {})

    return write


COMPOSED.update({"Assign": _assign("copy_"), "AssignAdd": _assign("add_"), "AssignSub": _assign("sub_")})


@_translates("NewZeros")
def _new_zeros(input: Any, size: Any, dtype: Any = None) -> Call:
    return NEUTRAL["new_zeros"], (input, size), _renamed({"dtype": dtype}) if dtype is not None else {}


@_translates("NewOnes")
def _new_ones(input: Any, size: Any, dtype: Any = None) -> Call:
    return NEUTRAL["new_ones"], (input, size), _renamed({"dtype": dtype}) if dtype is not None else {}


@_composes("typeof")
def _typeof(input: Any) -> Any:
    return ops.typeof(input._local) if hasattr(ops, "typeof") else ms.TensorType(input.dtype)


# ---------------------------------------------------------------- old primitives whose attributes matter


def _tril(primitive: Any, run: Callable[..., Any], input: Any) -> Call:
    return NEUTRAL["tril" if primitive.name == "Tril" else "triu"], (input, primitive.diagonal), {}


def _sort(primitive: Any, run: Callable[..., Any], input: Any) -> Call:
    return NEUTRAL["sort"], (input, primitive.axis, primitive.descending), {}


def _conv2d(primitive: Any, run: Callable[..., Any], input: Any, weight: Any) -> Call:
    if primitive.format != "NCHW":
        return passed_on("Conv2D", run), (input, weight), {}
    settings = (primitive.stride, primitive.padding, primitive.dilation, primitive.group, primitive.pad_mode)
    return NEUTRAL["conv2d"], (input, weight, None, *settings), {}


def _conv_transpose2d(primitive: Any, run: Callable[..., Any], input: Any, weight: Any, shape: Any) -> Call:
    if primitive.format != "NCHW":
        return passed_on("Conv2DTranspose", run), (input, weight, shape), {}
    settings = (primitive.stride, primitive.padding, 0, primitive.group, primitive.dilation, primitive.pad_mode)
    return NEUTRAL["conv_transpose2d"], (input, weight, None, *settings, tuple(shape)[2:]), {}


def _conv_transpose3d(primitive: Any, run: Callable[..., Any], input: Any, weight: Any) -> Call:
    spatial = [tuple(sizes[2:]) for sizes in (primitive.stride, primitive.output_padding, primitive.dilation)]
    settings = (spatial[0], primitive.pad_list, spatial[1], primitive.group, spatial[2], primitive.pad_mode)
    return NEUTRAL["conv_transpose3d"], (input, weight, None, *settings), {}


def _max_pool(primitive: Any, run: Callable[..., Any], input: Any) -> Call:
    if primitive.format != "NCHW":
        return passed_on("MaxPool", run), (input,), {}
    settings = (primitive.kernel_size, primitive.strides, primitive.pad_mode)
    return passed_on("max_pool2d", lambda block, *settings: run(block)), (input, *settings), {}


_ATTRIBUTES: dict[str, Callable[..., Call]] = {
    "Tril": _tril,
    "Triu": _tril,
    "Sort": _sort,
    "Conv2D": _conv2d,
    "Conv2DBackpropInput": _conv_transpose2d,
    "Conv2DTranspose": _conv_transpose2d,
    "Conv3DTranspose": _conv_transpose3d,
    "MaxPool": _max_pool,
}
