"""torch.func, forward mode and torch.compile through every op of `flashkernel.torch`, and around the plain ops."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import flashkernel as fk
import flashkernel.torch as fkt
from flashkernel import _dynamo
from keyword_calls import arrays, calls, replaced


def f(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


q, packed, cu = f(1, 2, 4, 8), f(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
weight, row, angles = f(3, 4), f(3), f(4, 4)
blocks, steps = torch.full((3, 16), 0x5B, dtype=torch.uint8), f(3, 1)  # of a weight in 4 bits
eighths = f(3, 32).to(torch.float8_e4m3fn)
# Each op as a function of one tensor.
OPS = {
    "attention": (lambda x: fkt.attention(x, q, x, causal=True), q),
    "attention_varlen": (lambda x: fkt.attention_varlen(x, packed, x, cu, cu, 4, 4), packed),
    "cross_entropy": (lambda x: fkt.cross_entropy(x, torch.tensor([0, 1])), f(2, 4)),
    "fused_linear": (lambda x: fkt.fused_linear(x, weight, row, x[0], activation="silu"), f(2, 4)),
    "layer_norm": (lambda x: fkt.layer_norm(x, x[0], residual=x)[0], f(2, 4)),
    "linear": (lambda x: fkt.linear(x, weight, row, activation="silu"), f(2, 4)),
    "linear_cross_entropy": (lambda x: fkt.linear_cross_entropy(x, weight, torch.tensor([0, 2]), row), f(2, 4)),
    "linear_selected_log_prob": (lambda x: fkt.linear_selected_log_prob(x, weight, torch.tensor([0, 2])), f(2, 4)),
    "linear_fp8": (lambda x: fkt.linear_fp8(x, eighths, None, steps[:1], row, activation="silu"), f(2, 32)),
    "log_softmax": (fkt.log_softmax, f(2, 4)),
    "quantized_linear": (lambda x: fkt.quantized_linear(x, blocks, steps, None, row, activation="silu"), f(2, 32)),
    "rms_norm": (lambda x: fkt.rms_norm(x, x[0]), f(2, 4)),
    "rope": (lambda x: torch.cat(fkt.rope(x, 2 * x)), q),
    "rope_table": (lambda x: fkt.rope_table(x, None, angles, angles), q),
    "softmax": (lambda x: fkt.softmax(x, 0), f(2, 4)),
    "swiglu": (lambda x: fkt.swiglu(x, 2 * x), f(2, 4)),
}
CACHES = {
    "attention_cascade",
    "attention_fp8",
    "attention_mla_decode",
    "attention_paged",
    "kv_append",
    "kv_read",
    "latent_append",
}
cases = pytest.mark.parametrize("name", OPS)


def test_every_op_is_here():
    names = {name for name in fkt.__all__ if name[0].islower()}
    composed = {"scaled_dot_product_attention"}  # of attention, whose sentences it says: test_sdpa.py
    no_gradient = {
        "layer_norm_quantized",
        "pack_mask",
        "quantize_fp8_blocks",
        "rms_norm_quantized",
        "sample",
    }  # their results are of 8 bits, or integers: test_torch_compile.py
    assert set(OPS) | CACHES | no_gradient == names - composed == set(_dynamo.TRACEABLE)


@cases
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_is_refused(name, grad):
    op, x = OPS[name]

    def dual():
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(op(forward_ad.make_dual(x, x)))

    for call in (lambda: torch.func.jvp(op, (x,), (x,)), lambda: torch.func.jacfwd(op)(x), dual):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(NotImplementedError, match=f"^{name}: an argument carries a forward-mode derivative"),
        ):
            call()


@cases
def test_forward_mode_is_refused_beside_a_gradient(name):
    op, x = OPS[name]
    leaf = x.clone().requires_grad_()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"^{name}: .* forward-mode"):
        op(forward_ad.make_dual(leaf, x))


@cases
def test_a_level_without_tangents_is_no_reason(name):
    op, x = OPS[name]
    with forward_ad.dual_level():
        assert torch.equal(op(x), op(x.clone().requires_grad_()))


@pytest.mark.parametrize("name", sorted(CACHES))
def test_caches(name):
    _, keywords = calls()[name]
    keywords = {k: v for k, v in keywords.items() if k != "out"}
    if "rope" in keywords:
        del keywords["rope"]["q_out"]
    op = getattr(fkt, name)
    for path, tensor in arrays(keywords).items():
        if not tensor.is_floating_point() or path[-1] == "inv_freq":
            continue
        with (
            forward_ad.dual_level(),
            pytest.raises((NotImplementedError, RuntimeError), match=f"^{name}: .* forward-mode"),
        ):
            op(**replaced(keywords, path, forward_ad.make_dual(tensor, torch.ones_like(tensor))))
        with pytest.raises(NotImplementedError, match=f"^{name}: "):
            torch.func.grad(lambda t, path=path: op(**replaced(keywords, path, t)))(tensor)
    if name == "kv_append":
        del keywords["rope"]
        with pytest.raises(NotImplementedError, match=r"^kv_append: it writes to its arguments, which vmap"):
            torch.func.vmap(lambda k: op(**{**keywords, "k": k}))(torch.stack([keywords["k"]] * 2))


@cases
def test_gradients_by_torch_func(name):
    op, x = OPS[name]
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(op(leaf).square().sum(), leaf)
    assert torch.equal(torch.func.grad(lambda y: op(y).square().sum())(x), expected)
    out, pull = torch.func.vjp(op, x)
    assert torch.equal(out, op(x)) and torch.equal(pull(2 * out)[0], expected)
    jacobian = torch.autograd.functional.jacobian(op, x)
    torch.testing.assert_close(torch.func.jacrev(op)(x), jacobian)


@cases
def test_expanded_gradients(name):
    """sum().backward() hands an op a gradient whose elements are all one number in memory."""
    op, x = OPS[name]
    leaf = x.clone().requires_grad_()
    out = op(leaf)
    (expanded,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
    (whole,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    torch.testing.assert_close(expanded, whole)


# Every tensor of numbers that an op of flashkernel.torch takes. Tokens have no gradient, nor has what is written.
TENSORS = [
    pytest.param(case, path, id=f"{case}-{'.'.join(map(str, path))}")
    for case, (op, keywords) in calls().items()
    if op in OPS
    for path, tensor in arrays(keywords).items()
    if tensor.is_floating_point() and path[0] not in ("out", "residual_out", "grads")
]
CONSTANTS = {"alibi_slopes", "class_weights", "cos", "sin", "inv_freq", "scales", "zeros", "x_scale", "weight_scale"}


@pytest.mark.parametrize("case, path", TENSORS)
def test_no_gradient_is_dropped(case, path):
    """There is one, by backward() as by torch.func, or the call is refused; where others have one, too."""
    name, keywords = calls()[case]
    keywords = {key: value for key, value in keywords.items() if key not in ("out", "residual_out")}
    tensor = arrays(keywords)[path]

    def loss(value, /, **others):
        results = getattr(fkt, name)(**{**replaced(keywords, path, value), **others})
        return sum(result.square().sum() for result in (results if isinstance(results, tuple) else (results,)))

    leaf = tensor.clone().requires_grad_()
    if tensor.element_size() == 1:  # 8-bit floats, which torch has no arithmetic for
        with pytest.raises(NotImplementedError, match=rf"^{name}: {path[0]} .*requires a gradient"):
            loss(leaf)
        return
    if path[0] not in CONSTANTS:
        (expected,) = torch.autograd.grad(loss(leaf), leaf)
        assert expected.abs().sum() > 0
        torch.testing.assert_close(torch.func.grad(loss)(tensor), expected)
        return
    first = next(iter(keywords))
    alone = path[0] == first or keywords[first].element_size() == 1
    beside = {} if alone else {first: keywords[first].clone().requires_grad_()}
    said = f"^{name}: {path[0]} requires a gradient, and this op has none of it"
    for call in (lambda: loss(leaf), lambda: loss(leaf, **beside), lambda: torch.func.grad(loss)(tensor)):
        with pytest.raises(NotImplementedError, match=said):
            call()
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=said.removeprefix("^")):
        compiled(leaf)
    with torch.no_grad():
        loss(leaf)


@cases
def test_vmap(name):
    op, x = OPS[name]
    many = torch.stack([x, 2 * x, 0.5 * x], 1)
    torch.testing.assert_close(torch.func.vmap(op, in_dims=1)(many), torch.stack([op(y) for y in many.unbind(1)]))
    gradient = torch.func.grad(lambda y: op(y).square().sum())
    torch.testing.assert_close(
        torch.func.vmap(gradient, in_dims=1)(many), torch.stack([gradient(y) for y in many.unbind(1)])
    )


@cases
def test_second_derivatives(name):
    op, x = OPS[name]
    twice = torch.func.grad(lambda z: torch.func.grad(lambda y: op(y).square().sum())(z).sum())
    if name in ("rope", "rope_table"):  # linear: their gradient is themselves
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(op(leaf).square().sum(), leaf, create_graph=True)
        (expected,) = torch.autograd.grad(first.sum(), leaf)
        torch.testing.assert_close(twice(x), expected)
        return
    of = {"quantized_linear": "linear", "linear_fp8": "linear", "fused_linear": "rms_norm"}  # which they call
    gradient = of.get(name, name)
    with pytest.raises(NotImplementedError, match=f"{gradient}_backward: second derivatives are not implemented"):
        twice(x)


# --- torch.ops.flashkernel.*, which callers may also use without flashkernel.torch's functions

REGISTERED = sorted(
    name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("flashkernel::")
)
PLAIN_ARGUMENTS = {"int": 1, "float": 1.0, "bool": False, "str": "mean"}


def schema_arguments(op):
    """Arguments of the types that the op's schema asks for, and the places of the tensors among them."""
    args, places = [], []
    for place, argument in enumerate(op._schema.arguments):
        kind = argument.type.getElementType() if argument.type.kind() == "OptionalType" else argument.type
        if kind.kind() == "TensorType":
            places.append(place)
            args.append(torch.ones(2, 4))
        else:
            optional = kind is not argument.type
            args.append(None if optional else PLAIN_ARGUMENTS[kind.annotation_str])
    return args, places


@pytest.mark.parametrize("name", REGISTERED)
def test_forward_mode_is_refused_by_registered_ops(name):
    op = getattr(torch.ops.flashkernel, name)
    args, places = schema_arguments(op.default)
    assert places
    for place in places:

        def call(x, place=place):
            return op(*args[:place], x, *args[place + 1 :])

        said = f"^{name}: an argument carries a forward-mode derivative"
        for transform in (torch.func.jvp, lambda f, x, t: torch.func.jacfwd(f)(*x)):
            with pytest.raises(NotImplementedError, match=said):
                transform(call, (args[place],), (args[place],))
        for grad in (True, False):
            with (
                torch.set_grad_enabled(grad),
                forward_ad.dual_level(),
                pytest.raises(NotImplementedError, match=said),
            ):
                call(forward_ad.make_dual(args[place], args[place]))


def test_a_registered_op_without_a_gradient_refuses_one():
    _, given = calls()["kv_append"]
    given = {key: value for key, value in given.items() if key != "rope"}
    rest = (None, None, None, None, 1e4, None, False, None, None)
    torch.ops.flashkernel.kv_append(*given.values(), *rest)
    given["k"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^kv_append: an argument requires a gradient"):
        torch.ops.flashkernel.kv_append(*given.values(), *rest)
    with torch.no_grad():
        torch.ops.flashkernel.kv_append(*given.values(), *rest)


# --- plain ops where torch traces


@pytest.mark.parametrize("case", ["add", "softmax", "rms_norm", "attention", "kv_append", "reduce_sum"])
def test_traced_tensors_are_refused(case):
    op, keywords = calls()[case]
    path, tensor = next(iter(arrays(keywords).items()))
    where = f"call flashkernel.torch.{op}" if op in fkt.__all__ else "this op runs on real tensors only"

    def run(value):
        return getattr(fk, op)(**replaced(keywords, path, value))

    for transform in (torch.func.vmap(run), torch.func.grad(run), lambda t: torch.func.jvp(run, (t,), (t,))):
        with pytest.raises((ValueError, RuntimeError), match=f"^{op}: .* torch.*{where}|^{op}: .* requires a gradient"):
            transform(tensor)
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(TypeError, match=f"^{op}: .*FakeTensor; {where}"):
        run(mode.from_tensor(tensor))
    with pytest.raises(TypeError, match=f"^{op}: .*Proxy; {where}"):
        torch.fx.symbolic_trace(lambda t: run(t))
    with pytest.raises(ValueError, match=f"^{op}: .* no memory .* flashkernel.torch takes those"):
        run(torch._to_functional_tensor(tensor))


COMPILED = """
{imports}
x = torch.ones(2, 4)
try:
    torch.compile(lambda x: fk.{call} + 1, backend="eager", fullgraph=True)(x)
except Exception as error:
    print("SAID:", str(error).replace(chr(10), " "))
with torch.no_grad():
    print("RAN:", torch.compile(lambda x: fk.{call} + 1, backend="eager")(x).flatten()[0].item())
"""


@pytest.mark.parametrize(
    "imports, call, said",
    [
        ("import flashkernel as fk, torch", "rms_norm(x)", "call flashkernel.torch.rms_norm, which torch.compile can"),
        pytest.param(
            "import torch, torch._dynamo, flashkernel as fk",
            "softmax(x) * 4",
            "call flashkernel.torch.softmax, which",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "import torch, flashkernel as fk, flashkernel.torch",
            "add(x, x) / 2",
            "flashkernel.torch has no op of that name",
            marks=pytest.mark.long,
        ),
    ],
)
def test_compiled(imports, call, said):
    done = subprocess.run(
        [sys.executable, "-c", COMPILED.format(imports=imports, call=call)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"flashkernel.{call.split('(')[0]} can't be traced" in done.stdout and said in done.stdout
    assert abs(float(done.stdout.split("RAN: ")[1]) - 2) < 1e-5


def test_importing_flashkernel_imports_no_torch():
    code = "import sys, flashkernel; assert 'torch' not in sys.modules"
    code += "; import torch, flashkernel.torch; assert 'torch._dynamo' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
