"""Activations by name and as objects: what is allowed, and their formulas."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import pytest
import torch

from deep_moe.activations import (
    ACTIVATIONS,
    Activation,
    GatedActivation,
    GeluTanh,
    Relu2,
    Situ,
    Swiglu,
    SwigluOai,
    SwigluStep,
    activation_of,
    has_gate,
)

HEADERS = Path(__file__).parents[2] / "include/deep_moe/activations"


def test_names_give_the_defaults() -> None:
    assert activation_of() == activation_of("swiglu") == Swiglu(math.inf)
    assert activation_of("swiglu_oai") == SwigluOai(alpha=1.702, limit=7.0)
    assert activation_of("situ") == Situ(beta=4.0, linear_beta=25.0)
    assert activation_of("swiglu_step") == SwigluStep(limit=7.0)
    assert activation_of("gelu_tanh") == GeluTanh()
    assert activation_of("relu2") == Relu2()


def test_only_relu2_has_no_gate() -> None:
    assert [name for name in ACTIVATIONS if not has_gate(name)] == ["relu2"]
    assert not has_gate(Relu2())
    assert has_gate(GeluTanh())


def test_objects_are_taken_as_they_are() -> None:
    for activation in (Swiglu(2), SwigluOai(alpha=1), Situ(linear_beta=3)):
        assert activation_of(activation) is activation


def test_a_clamp_is_the_parameter_that_bounds() -> None:
    assert activation_of("swiglu", 7) == Swiglu(7.0)
    assert activation_of("swiglu", math.inf) == Swiglu()
    assert activation_of("swiglu_oai", 5) == SwigluOai(limit=5.0)
    assert activation_of("swiglu_step", 16) == SwigluStep(16.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("gelu",), ValueError, "must be one of 'gelu_tanh', 'relu2', 'situ', 'swiglu', .* got 'g"),
        ((None,), TypeError, "activation must be 'gelu_tanh', .* got NoneType"),
        ((["swiglu"],), TypeError, "activation must be 'gelu_tanh', .* got list"),
        ((Swiglu,), TypeError, "object of deep_moe.activations: GeluTanh, Relu2, .* got ABC"),
        (("relu2", 7.0), ValueError, "activation_clamp must be None with activation 'relu2'"),
        (("situ", 7.0), ValueError, "activation_clamp must be None with activation 'situ'.*got 7"),
        ((Swiglu(), 7.0), ValueError, r"activation_clamp must be None beside Swiglu\(clamp=inf\)"),
        (("swiglu", 0.0), ValueError, "activation_clamp must be None or a positive number.* got 0"),
        (("swiglu", math.nan), ValueError, "activation_clamp must be None or .* got nan"),
        (("swiglu", 1e39), ValueError, r"activation_clamp must be None or .* got 1e\+39"),
        (("swiglu", True), TypeError, "activation_clamp must be None or .* got True"),
        (("swiglu", "7"), TypeError, "activation_clamp must be None or .* got '7'"),
        (("swiglu_oai", math.inf), ValueError, "limit must be a positive number .* got inf"),
    ],
)
def test_what_is_refused(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        activation_of(*arguments)


PARAMETERS = [(kind, name) for kind in ACTIVATIONS.values() for name in kind().parameters]


@pytest.mark.parametrize(("kind", "name"), PARAMETERS)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, -math.inf, 1e39, 1e-39])
def test_parameters_that_are_no_positive_float32(
    kind: type[Activation], name: str, value: float
) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive number that float32 holds"):
        kind(**{name: value})


@pytest.mark.parametrize(("kind", "name"), PARAMETERS)
@pytest.mark.parametrize("value", ["7", None, True])
def test_parameters_that_are_no_number(kind: type[Activation], name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a positive number that float32 holds"):
        kind(**{name: value})


@pytest.mark.parametrize("name", ["alpha", "limit"])
def test_only_the_clamp_may_be_infinite(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        SwigluOai(**{name: math.inf})
    assert Swiglu(math.inf).clamp == math.inf


def test_parameters_are_what_float32_makes_of_them() -> None:
    assert SwigluOai().alpha == torch.tensor(1.702, dtype=torch.float32).item() != 1.702
    assert Swiglu(7) == Swiglu(7.0)
    assert isinstance(Swiglu(7).clamp, float)


def test_activations_are_values() -> None:
    assert len({Swiglu(4), Swiglu(4.0), SwigluOai(4, 25), Situ(4, 25), Situ()}) == 3
    for activation in (Swiglu(2), SwigluOai(), Situ()):
        assert pickle.loads(pickle.dumps(activation)) == activation


@pytest.mark.parametrize("kind", ACTIVATIONS.values())
def test_every_activation_has_its_header(kind: type[Activation]) -> None:
    header = (HEADERS / kind.name / "activation.cuh").read_text()
    assert f"struct {kind.struct} {{" in header
    assert f"has_gate = {'true' if kind.has_gate else 'false'};" in header
    assert kind.has_gate is issubclass(kind, GatedActivation)
    assert kind.attributes.keys() == (kind().parameters.keys())
    assert all(f"Parameters::{name};" in header for name in kind().parameters)
    assert kind.clamp_parameter in (None, *kind().parameters)


def tensors(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_formulas() -> None:
    gate, up = tensors(0.5, -1.5, 9.0, -30.0), tensors(3.0, -2.0, -9.0, 40.0)

    def sigmoid(x: torch.Tensor) -> torch.Tensor:
        return 1 / (1 + torch.exp(-x))

    expected = {
        Swiglu(): gate * sigmoid(gate) * up,
        Swiglu(2): tensors(0.5, -1.5, 2.0, -30.0)
        * sigmoid(tensors(0.5, -1.5, 2.0, -30.0))
        * tensors(2.0, -2.0, -2.0, 2.0),
        SwigluOai(1.5, 7): tensors(0.5, -1.5, 7.0, -30.0)
        * sigmoid(1.5 * tensors(0.5, -1.5, 7.0, -30.0))
        * (tensors(3.0, -2.0, -7.0, 7.0) + 1),
        Situ(4, 25): 4 * torch.tanh(gate / 4) * sigmoid(gate) * 25 * torch.tanh(up / 25),
        SwigluStep(3): (gate * sigmoid(gate)).clamp(max=3) * tensors(3.0, -2.0, -3.0, 3.0),
    }
    for activation, values in expected.items():
        torch.testing.assert_close(activation(gate, up), values, rtol=1e-14, atol=0)
        single = activation(gate.float(), up.float())
        torch.testing.assert_close(single.double(), values, rtol=2e-6, atol=1e-18)


def test_gelu_is_that_of_torch() -> None:
    gate, up = torch.linspace(-4, 12, 4001, dtype=torch.float64), tensors(-1.5)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(GeluTanh()(gate, up), expected, rtol=1e-10, atol=1e-15)


def test_without_a_gate_rows_are_those_of_up() -> None:
    rows = tensors(-3.0, -0.0, 0.5, 7.0)
    assert Relu2().of_linear1(rows).tolist() == [0.0, 0.0, 0.25, 49.0]
    pair = torch.stack([rows, rows.flip(0)])
    assert torch.equal(Swiglu().of_linear1(pair.flatten()), Swiglu()(*pair))


def test_extremes() -> None:
    gate, up = tensors(0.0, -200.0, 200.0, math.inf).float(), torch.ones(4)
    expected = {
        Swiglu(10): [0.0, 0.0, 10 / (1 + math.exp(-10)), 10 / (1 + math.exp(-10))],
        SwigluOai(1.0, 10.0): [0.0, 0.0, 20 / (1 + math.exp(-10)), 20 / (1 + math.exp(-10))],
        Situ(4, 1e38): [0.0, 0.0, 4.0, 4.0],
    }
    for activation, values in expected.items():
        assert activation(gate, up).tolist() == pytest.approx(values)


@pytest.mark.parametrize(
    "activation",
    [
        Swiglu(),
        Swiglu(0.1),
        SwigluOai(),
        SwigluOai(alpha=50.0, limit=0.01),
        Situ(),
        *(Situ(beta=beta) for beta in (1e-30, 1e-3, 0.1, 1.0, 1e4, 1e38)),
        GeluTanh(),
        SwigluStep(),
        SwigluStep(0.1),
    ],
    ids=str,
)
def test_the_lowest_gate_is_the_lowest_and_the_only_turn(activation: GatedActivation) -> None:
    where = activation.lowest_gate
    sizes = torch.logspace(-40, 3, 20001, dtype=torch.float64)
    gates = torch.cat([-sizes.flip(0), sizes])
    values = activation.gate_factor(gates)
    lowest = activation.gate_factor(tensors(where))
    slack = 1e-12 * values.abs()
    assert (values >= lowest - slack).all()
    steps = values.diff()
    assert (steps[gates[1:] < where] <= slack[1:][gates[1:] < where]).all()
    assert (steps[gates[:-1] > where] >= -slack[:-1][gates[:-1] > where]).all()
    assert (activation.up_factor(gates).diff() >= 0).all()


def test_nan_stays_nan() -> None:
    assert Relu2().of_linear1(tensors(math.nan)).isnan().all()
    for activation in (Swiglu(), Swiglu(1), SwigluOai(), Situ(), GeluTanh(), SwigluStep()):
        result = activation(tensors(math.nan, 1.0), tensors(1.0, math.nan))
        assert result.isnan().all()


def test_a_large_bound_of_situ_is_no_bound() -> None:
    """Where gate over beta is subnormal, it would lose digits."""
    gate, up = torch.tensor([1.1, -2.2, 1e-3]), torch.tensor([0.3, 5.5, 7.0])
    torch.testing.assert_close(Situ(1e38, 3e38)(gate, up), Swiglu()(gate, up), rtol=1e-6, atol=0)
