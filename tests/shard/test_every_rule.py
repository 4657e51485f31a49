"""Every rule of the table has a sample that the validator tries: here are those that no family's own test has."""

import importlib
import random
import warnings
from pathlib import Path

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.shard.rule_kit.rule_table import rule_names
from tests.shard.choices import choices_under, every_choice, planned_calls
from tests.shard.validator import Sample, _calls_of, _replace, assert_valid, layouts_of, tensor, tensors_in

only_on = "torch"  # calls PyTorch's operators one by one; MindSpore's own: test_mindspore_rules.py

F = "nn.functional"
INSIDE = {"low": 0.1, "high": 0.9}  # where every function below is smooth
UNARY = [
    *("acos", "angle", "asin", "asinh", "atan", "atanh", "ceil", "conj", "conj_physical", "cos", "cosh", "deg2rad"),
    *("digamma", "erf", "erfc", "erfinv", "exp2", "expm1", "floor", "frac", "i0", "lgamma", "log10", "log1p", "log2"),
    *("logit", "nan_to_num", "positive", "rad2deg", "reciprocal", "resolve_conj", "resolve_neg", "round", "rsqrt"),
    *("sgn", "sin", "sinc", "sinh", "square", "tan", "trunc", "special.entr", "special.erfcx", "special.i0e"),
    *("special.i1", "special.i1e", "special.log_ndtr", "special.ndtr", "special.ndtri"),
    *(f"{F}.{name}" for name in ("celu", "elu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu")),
    *(f"{F}.{name}" for name in ("mish", "relu6", "selu", "softplus", "softshrink")),
]
QUESTIONS = [
    *("isfinite", "isinf", "isnan", "isneginf", "isposinf", "isreal", "signbit", "logical_not"),
    *("special.bessel_j0", "special.bessel_j1", "special.bessel_y0", "special.bessel_y1", "special.airy_ai"),
    *(f"special.{scaled}modified_bessel_k{order}" for scaled in ("", "scaled_") for order in (0, 1)),
    *("special.modified_bessel_i0", "special.modified_bessel_i1", "special.spherical_bessel_j0"),
]
BINARY = [
    *("atan2", "copysign", "float_power", "fmax", "fmin", "fmod", "hypot", "logaddexp", "logaddexp2", "maximum"),
    *("minimum", "remainder", "xlogy", "special.xlog1py", "clamp_max"),
]
COMPARISONS = [
    *("eq", "ge", "gt", "le", "ne", "isclose", "logical_and", "logical_or", "logical_xor", "heaviside", "nextafter"),
    *("floor_divide", "special.zeta", "igamma", "igammac"),
]
POLYNOMIALS = [
    *(f"special.{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
    *("special.laguerre_polynomial_l", "special.legendre_polynomial_p"),
    *("special.hermite_polynomial_h", "special.hermite_polynomial_he"),
]
INTEGERS = ["bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "gcd", "lcm"]


def _whole_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return tensor(*shape, seed=seed, low=1, high=6).to(torch.int64)


ELEMENTS = [
    *(Sample(name, (tensor(5, 3, **INSIDE),)) for name in UNARY),
    *(Sample(name, (tensor(5, 3, **INSIDE),), gradients=False) for name in QUESTIONS),
    Sample("acosh", (tensor(5, 3, low=1.1),)),
    Sample("polygamma", (1, tensor(5, 3, **INSIDE))),
    *(Sample(name, (tensor(5, 3, **INSIDE), 3), gradients=False) for name in POLYNOMIALS),
    Sample("mvlgamma", (tensor(5, 3, low=2.1, high=4.0), 2)),
    Sample("frexp", (tensor(5, 3),), gradients=False),
    Sample(f"{F}.glu", (tensor(5, 4), 1)),
    Sample(f"{F}.glu", (tensor(4, 3), 0)),
    Sample(f"{F}.threshold", (tensor(5, 3), 0.1, 3.0)),
    Sample("bitwise_not", (_whole_numbers(5, 3),)),
    Sample("Tensor.fill_", (tensor(5, 3), 2.0)),
    Sample("Tensor.__rpow__", (tensor(5, 3, **INSIDE), 2.0)),
    Sample("Tensor.__rdiv__", (tensor(5, 3, **INSIDE), 2.0)),
    Sample("Tensor.__rfloordiv__", (tensor(5, 3, **INSIDE), 2.0), gradients=False),
    Sample("Tensor.__rmod__", (tensor(5, 3, **INSIDE), 2.0), gradients=False),
    Sample("alias_copy", (tensor(5, 3),)),
    Sample("ops.aten.alias", (tensor(5, 3),)),
    Sample("ops.aten.lift_fresh", (tensor(5, 3),), gradients=False),
    Sample("Tensor.detach", (tensor(5, 3),)),
]
PAIRS = [
    *(Sample(name, (tensor(5, 3, **INSIDE), tensor(3, seed=1, **INSIDE))) for name in BINARY),
    *(Sample(name, (tensor(5, 3, **INSIDE), tensor(5, 1, seed=1, low=1.1)), gradients=False) for name in COMPARISONS),
    *(Sample(name, (_whole_numbers(5, 3), _whole_numbers(3, seed=1))) for name in INTEGERS),
    Sample("ldexp", (tensor(5, 3), _whole_numbers(5, 3))),
    Sample("isin", (_whole_numbers(5, 3), _whole_numbers(2, seed=1))),
    Sample("addcdiv", (tensor(4, 2), tensor(4, 2, seed=1), tensor(2, seed=2, low=1.0)), {"value": 0.5}),
    Sample("addcmul", (tensor(4, 2), tensor(4, 2, seed=1), tensor(2, seed=2)), {"value": 0.5}),
    Sample("lerp", (tensor(4, 2), tensor(4, 2, seed=1), tensor(2, seed=2))),
    Sample("lerp", (tensor(4, 2), tensor(4, 2, seed=1), 0.3)),
    Sample("polar", (tensor(5, 3, low=1.0), tensor(3, seed=1))),
    *(Sample(f"{F}.prelu", (tensor(5, 3, 2), tensor(size, seed=1))) for size in (1, 3)),
    Sample(f"{F}.prelu", (tensor(5), tensor(1, seed=1))),
    Sample("vdot", (tensor(5), tensor(5, seed=1))),
    Sample("ops.aten._cdist_forward", (tensor(5, 2), tensor(3, 2, seed=1), 2.0, None), gradients=False),
]
CONVERSIONS = [
    *(Sample(f"Tensor.{name}", (tensor(5, 3, **INSIDE),), gradients=False) for name in ("byte", "char")),
    *(Sample(f"Tensor.{name}", (tensor(5, 3),), gradients=False) for name in ("cdouble", "cfloat", "chalf")),
]
COPIES = [
    Sample("ops.aten._unsafe_view", (tensor(4, 6), (4, 2, 3))),
    Sample("view_copy", (tensor(4, 6), (4, 2, 3))),
    Sample("expand_copy", (tensor(5, 1), (5, 3))),
    Sample("diagonal_copy", (tensor(4, 4),)),
    Sample("diagflat", (tensor(4),)),
    Sample("linalg.diagonal", (tensor(3, 4, 4),)),
    Sample("narrow_copy", (tensor(5, 3), 0, 1, 3)),
    Sample("permute_copy", (tensor(5, 3), (1, 0))),
    Sample("select_copy", (tensor(5, 3), 0, 1)),
    Sample("ops.aten.slice", (tensor(5, 3), 0, 1, 4)),
    Sample("split_copy", (tensor(5, 3), 2)),
    Sample("split_with_sizes_copy", (tensor(5, 3), [2, 3])),
    Sample("unsafe_split", (tensor(5, 3), 2)),
    Sample("unsafe_split_with_sizes", (tensor(5, 3), [2, 3])),
    Sample("unsafe_chunk", (tensor(5, 3), 2)),
    Sample("squeeze_copy", (tensor(5, 1, 3),)),
    Sample("unsqueeze_copy", (tensor(5, 3), 1)),
    Sample("t_copy", (tensor(5, 3),)),
    Sample("transpose_copy", (tensor(5, 3), 0, 1)),
    Sample("unbind_copy", (tensor(3, 4),)),
    Sample("unfold_copy", (tensor(5, 3), 0, 2, 1)),
    Sample("constant_pad_nd", (tensor(5, 3), (1, 0, 0, 2), 0.5)),
    Sample("native_channel_shuffle", (tensor(3, 4, 2, 3), 2), gradients=False),
    Sample("_index_put_impl_", (tensor(5, 3), [torch.tensor([0, 3])], tensor(2, 3, seed=1))),
    Sample("nanquantile", (tensor(5, 3), 0.4, 0)),
]
SPD = torch.stack([torch.eye(3, dtype=torch.float64) * 4 + tensor(3, 3, seed=s) / 9 for s in range(3)])
SPD = (SPD + SPD.mT) / 2
LU, PIVOTS = torch.linalg.lu_factor(SPD)
LD, LD_PIVOTS = torch.linalg.ldl_factor(SPD)
QR, TAU = torch.geqrf(SPD)
MATRICES = [
    *(Sample(name, (SPD,)) for name in ("cholesky", "det", "slogdet", "matrix_exp", "pinverse", "linalg.lu")),
    *(Sample(name, (SPD,), gradients=False) for name in ("cholesky_inverse", "qr", "svd", "_lu_with_info")),
    *(Sample(f"linalg.{name}", (SPD,), gradients=False) for name in ("cholesky_ex", "eigvals", "inv_ex", "ldl_factor")),
    *(Sample(f"linalg.{name}", (SPD,), gradients=False) for name in ("eig", "ldl_factor_ex", "lu_factor_ex", "svd")),
    Sample("matrix_power", (SPD, 3)),
    Sample("linalg.vander", (tensor(3, 4),)),
    Sample("linalg.solve_ex", (SPD, tensor(3, 3, 2))),
    Sample("linalg.ldl_solve", (LD, LD_PIVOTS, tensor(3, 3, 2)), gradients=False),
    Sample("linalg.lu_solve", (LU, PIVOTS, tensor(3, 3, 2)), gradients=False),
    Sample("lu_solve", (tensor(3, 3, 2), LU, PIVOTS), gradients=False),
    Sample("lu_unpack", (LU, PIVOTS), gradients=False),
    Sample("ormqr", (QR, TAU, tensor(3, 3, 2)), gradients=False),
    Sample("triangular_solve", (tensor(3, 3, 2), SPD), gradients=False),
]
POOLED, PLACES = torch.nn.functional.max_pool2d(tensor(2, 3, 4, 4), 2, return_indices=True)
POOLED3, PLACES3 = torch.nn.functional.max_pool3d(tensor(1, 3, 2, 2, 2), 2, return_indices=True)
RESAMPLING = [
    Sample(f"{F}.conv_transpose3d", (tensor(1, 2, 2, 2, 2), tensor(2, 3, 2, 2, 2, seed=1))),
    *(
        Sample(f"{F}.{name}", (tensor(3, 2, *(4,) * dims), 2))
        for name, dims in (("adaptive_max_pool1d", 1), ("adaptive_max_pool3d", 3), ("adaptive_avg_pool3d", 3))
    ),
    *(
        Sample(f"{F}.{name}_with_indices", (tensor(3, 2, *(4,) * dims), 2))
        for name, dims in (("adaptive_max_pool1d", 1), ("adaptive_max_pool3d", 3))
    ),
    *(
        Sample(f"{F}.{name}_with_indices", (tensor(3, 2, *(4,) * dims), 2))
        for name, dims in (("max_pool1d", 1), ("max_pool3d", 3))
    ),
    Sample(f"{F}.max_unpool2d", (POOLED, PLACES, 2)),
    Sample(f"{F}.max_unpool3d", (POOLED3, PLACES3, 2)),
    *(
        Sample(f"{F}.interpolate", (tensor(3, 2, *(2,) * dims),), {"scale_factor": 2, "mode": mode})
        for dims, mode in (
            *((1, "linear"), (2, "bicubic"), (3, "trilinear"), (3, "nearest")),
            *((dims, "nearest-exact") for dims in (1, 2, 3)),
        )
    ),
    *(
        Sample(f"{F}.interpolate", (tensor(2, 3, 4, 4),), {"size": 2, "mode": mode, "antialias": True})
        for mode in ("bilinear", "lanczos")
    ),
    Sample("grid_sampler_2d", (tensor(2, 3, 4, 4), tensor(2, 3, 5, 2, seed=1, **INSIDE), 0, 0, False)),
    Sample("grid_sampler_3d", (tensor(2, 1, 3, 3, 3), tensor(2, 2, 2, 2, 3, seed=1, **INSIDE), 0, 0, False)),
    Sample(
        "_native_batch_norm_legit",
        (tensor(5, 3), tensor(3, low=1.0), tensor(3), tensor(3), tensor(3, low=0.5), True, 0.1, 1e-5),
        gradients=False,
    ),
]
COMPLEX = torch.complex(tensor(5, 4), tensor(5, 4, seed=1))
SPECTRA = [
    *(Sample(f"fft.{kind}", (tensor(5, 4),)) for kind in ("fft", "ifft", "rfft", "ihfft", "fftshift", "ifftshift")),
    *(Sample(f"fft.{kind}", (COMPLEX, 6, 0)) for kind in ("fft", "ifft", "irfft", "hfft")),
    *(Sample(f"fft.{kind}", (tensor(3, 5, 4),)) for kind in ("fft2", "ifft2", "rfft2", "ihfft2")),
    *(Sample(f"fft.{kind}", (COMPLEX,), {"dim": (0, -1)}) for kind in ("irfft2", "hfft2", "fft2")),
    *(Sample(f"fft.{kind}", (tensor(3, 5, 4), (3, 3))) for kind in ("fftn", "ifftn", "rfftn", "ihfftn")),
    *(Sample(f"fft.{kind}", (COMPLEX,), {"dim": (1,)}) for kind in ("irfftn", "hfftn")),
    Sample("fft.fftshift", (tensor(5, 4), 0)),
]
FAMILIES = {
    "elements": ELEMENTS,
    "pairs": PAIRS,
    "conversions": CONVERSIONS,
    "copies": COPIES,
    "matrices": MATRICES,
    "resampling": RESAMPLING,
    "spectra": SPECTRA,
}
# They need a device that a test on a CPU does not have, or do nothing there.
ABOUT_DEVICES = {"cpu", "cuda", "npu", "xpu", "pin_memory"}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_same_as_one_device(worlds, family: str) -> None:
    assert_valid(worlds, FAMILIES[family])


def all_samples() -> list[Sample]:
    """The samples of all tests in this folder."""
    found: list[Sample] = []

    def take(value: object) -> None:
        if isinstance(value, Sample):
            found.append(value)
        elif isinstance(value, list):
            for item in value:
                take(item)

    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        if "from tests.shard.validator import Sample" not in file.read_text():
            continue
        for value in vars(importlib.import_module(f"tests.shard.{file.stem}")).values():
            take(value)
    return found


def names_with_a_sample() -> set[str]:
    """Runs on a rank: the operators whose rules the samples use."""
    warnings.simplefilter("ignore")
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    names: set[str] = set()
    for sample in all_samples():
        whole = [
            hp.distribute_tensor(value.detach().clone(), mesh, None)
            for value in tensors_in((sample.args, sample.kwargs))
        ]
        args, kwargs = _replace((sample.args, sample.kwargs), whole)
        with planned_calls() as calls:
            sample.function()(*args, **kwargs)
        for func, _, _ in calls:
            name = hp.get_platform().get_op_name(func)
            names |= {name, name.removesuffix("_")}
    return names


def test_the_planner_makes_no_choice_that_is_not_run() -> None:
    """Under layouts that are drawn; what is run is found without planning, see ``choices``."""
    mesh = hp.init_device_mesh("cpu", (2, 2), rank_list=range(4), init_backend=False)
    pick = random.Random(0)
    warnings.simplefilter("ignore")
    num_covered = 0
    # As_strided asks the ranks what is in memory; no layout is chosen for it.
    for sample in [one for one in all_samples() if str(one).partition("[")[0] != "as_strided"][::7]:
        tensors = tensors_in((sample.args, sample.kwargs))
        layouts = [layouts_of(mesh, value, value.is_floating_point()) for value in tensors]
        calls = _calls_of(sample, tensors, mesh)
        runs = every_choice(calls[0], layouts) if len(calls) == 1 else None
        if runs is None:
            continue
        num_covered += 1
        drawn = {tuple(map(pick.choice, layouts)) for _ in range(5)}
        missing = choices_under(calls[0], drawn) - choices_under(calls[0], runs)
        assert not missing, f"{sample}: {missing}"
    assert num_covered > 130


def test_no_rule_is_without_a_sample(worlds) -> None:
    covered = worlds(2).run(names_with_a_sample)[0]
    missing = sorted(set(rule_names()) - covered - ABOUT_DEVICES)
    assert not missing, f"{len(missing)} rules have no sample; add one to the family's test in tests/shard: {missing}"
