"""From MODEL and SHAPE as typed to modules and tensors."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from pipecompile.cli.load_model import ModelSource, load_model, random_input
from pipecompile.errors import InputError


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("32x3x8x8", (32, 3, 8, 8), torch.float32),
        ("7", (7,), torch.float32),
        ("2x5:int64", (2, 5), torch.int64),
        ("2x5:bool", (2, 5), torch.bool),
        ("2x5:bfloat16", (2, 5), torch.bfloat16),
        ("2x5:complex64", (2, 5), torch.complex64),
    ],
)
def test_a_shape_becomes_a_random_tensor(text, shape, dtype):
    tensor = random_input(text)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
    assert len(tensor.unique() if not dtype.is_complex else tensor) > 1


@pytest.mark.parametrize("text", ["", "x", "3x", "3x-1", "3,4", "3x4:", "3x4:nothing", "3x4:nn", "3.5"])
def test_what_is_no_shape_is_refused_by_name(text):
    with pytest.raises(InputError, match="is not a shape"):
        random_input(text)


def test_a_torchvision_model_has_random_weights_throughout(monkeypatch):
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", lambda *a, **k: pytest.fail("downloads"))
    assert type(load_model("torchvision:resnet18")).__name__ == "ResNet"
    assert type(load_model("torchvision:lraspp_mobilenet_v3_large")).__name__ == "LRASPP"


def test_a_name_that_torchvision_lacks_is_answered_with_near_ones():
    with pytest.raises(InputError, match=r"(?s)no model 'resnet51'.*resnet5\d"):
        load_model("torchvision:resnet51")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match="timm"):
        load_model("timm:resnet18")


def test_timm_is_asked_for_random_weights(monkeypatch):
    asked = {}
    fake = types.SimpleNamespace(
        is_model=lambda name: name == "tiny",
        list_models=lambda: ["tiny"],
        create_model=lambda name, **options: asked.update(options, name=name) or nn.Linear(1, 1),
    )
    monkeypatch.setitem(sys.modules, "timm", fake)
    assert isinstance(load_model("timm:tiny"), nn.Linear)
    assert asked == {"name": "tiny", "pretrained": False}
    with pytest.raises(InputError, match=r"(?s)no model 'tinny'.*tiny"):
        load_model("timm:tinny")


@pytest.mark.usefixtures("models")
def test_a_factory_of_the_current_directory():
    assert isinstance(load_model("mymodels:small"), nn.Sequential)
    assert isinstance(load_model("mymodels:Nested.ready"), nn.Linear)


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("resnet50", "names no model"),
        (":small", "names no model"),
        ("mymodels:", "names no model"),
        ("mymodels:smal", "(?s)mymodels has no 'smal'.*small"),
        ("mymodels:xyz", r"(?s)mymodels has no 'xyz'.*try    (?!torchvision)\w+"),
        ("mymodels:Nested.gone", "mymodels has no 'Nested.gone'"),
        ("mymodels:Nested.text", "(?s)not a torch.nn.Module.*str"),
        ("mymodels:needs", "(?s)cannot be called without arguments.*width"),
        ("mymodel:small", "there is no module 'mymodel'"),
        ("nowhere.at.all:small", "there is no module 'nowhere'"),
        ("mymodels.deeper:small", "mymodels"),
    ],
)
def test_a_model_that_cannot_be_found_is_named(spec, told):
    with pytest.raises(InputError, match=told):
        load_model(spec)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("import notthere_at_all", "No module named 'notthere_at_all'"),
        ("from torch import notthere", "cannot import name 'notthere'"),
    ],
)
def test_an_import_that_fails_inside_the_users_module_names_what_and_where(models, line, told):
    (models / "broken.py").write_text(f"import torch\n{line}\n")
    with pytest.raises(InputError, match="importing 'broken' failed") as caught:
        load_model("broken:small")
    assert told in str(caught.value)
    assert "broken.py:2" in str(caught.value)
    assert isinstance(caught.value.__cause__, ImportError)


def test_another_error_of_the_users_module_has_its_line(models):
    (models / "crooked.py").write_text("\n1 / 0\n")
    with pytest.raises(InputError, match=r"(?s)ZeroDivisionError: division by zero.*crooked.py:2") as caught:
        load_model("crooked:small")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.usefixtures("models")
def test_a_type_error_inside_the_factory_has_its_line(models):
    (models / "odd.py").write_text("def build():\n    return len(3)\n")
    with pytest.raises(InputError, match=r"(?s)odd:build raised TypeError: .*has no len.*odd.py:2"):
        load_model("odd:build")


@pytest.mark.usefixtures("models")
def test_equal_seeds_give_equal_weights_and_data():
    def loaded(seed):
        model, (data,) = ModelSource("mymodels:small", ["4x8"], seed).load()
        return torch.cat([*(p.detach().flatten() for p in model.parameters()), data.flatten()])

    loaded(0)  # importing the module draws numbers too
    assert torch.equal(loaded(1), loaded(1))
    assert not torch.equal(loaded(1), loaded(2))


@pytest.mark.parametrize("seed", ["100000000000000000000", "-100000000000000000000"])
def test_a_seed_that_torch_does_not_take_is_refused(cli, seed):
    """Before, a traceback of torch: "Overflow when unpacking long long"."""
    outcome = cli("check", "torchvision:resnet18", "--input", "2x3x32x32", "--seed", seed)
    assert outcome.code == 2
    assert "--seed" in outcome.err
