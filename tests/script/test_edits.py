"""Parameters and state that a script changes after ``prepare``: supported, or refused by name.

A result must never differ silently from plain PyTorch's.
"""

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import edits
from loops import Plain
from paceline.errors import ConfigError
from reference import differ
from runs import run_script

CLOSE = 1e-6
SCRIPT = Path(edits.__file__)
WAYS: dict[str, dict[str, object]] = {
    "peers": {"protocol": "full-sync", "path": "peers"},
    "store": {"protocol": "full-sync", "engine": "inline"},
    "k-sync:1": {"protocol": "k-sync:1", "path": "store"},
    "async": {"protocol": "async", "engine": "inline"},
    "collective": {"protocol": "full-sync", "path": "collective"},
    "local-sgd:1": {"protocol": "local-sgd:1", "path": "peers"},
    "local-sgd:2": {"protocol": "local-sgd:2", "engine": "inline"},
}
LOCAL_COLLECTIVE = "local-sgd:2 collective"
"""What members reduce there is no copy that went through a store."""
EXACT = ("peers", "store", "collective")


def results_of(folder: Path, case: str, way: str) -> list[dict[str, Tensor]]:
    settings = WAYS.get(way, {"protocol": "local-sgd:2", "path": "collective"})
    run_script(SCRIPT, folder, case, str(folder), workers=2, **settings)
    return [torch.load(folder / f"{case}-{worker}.pt") for worker in range(2)]


def assert_plain(folder: Path, case: str, way: str) -> None:
    """Every worker's result is that of plain PyTorch."""
    plain = edits.CASES[case](Plain())
    for result in results_of(folder, case, way):
        assert differ(result, plain) < CLOSE


def assert_refused(folder: Path, case: str, way: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        run_script(SCRIPT, folder, case, str(folder), workers=2, **WAYS[way])
    assert "\n" not in str(caught.value)


EDITED = r"^parameter '[\w.]+' was changed .* super\(\)\.step\("
MOVED = r"^parameter '[\w.]+' is torch.float64 of shape .*, but was changed after prepare\(\) to"
STEPS = ["clamp data", "clamp in place", "clamp by replacing", "norm rows", "load"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("edit", STEPS)
def test_weights_edited_after_a_step_are_refused_by_name(
    tmp_path: Path, way: str, edit: str
) -> None:
    assert_refused(tmp_path, f"step {edit}", way, EDITED)


@pytest.mark.parametrize(
    ("way", "edit"), [*itertools.product(WAYS, ["clamp data", "load", "one row"])]
)
def test_weights_edited_between_epochs_are_refused_by_name(
    tmp_path: Path, way: str, edit: str
) -> None:
    assert_refused(tmp_path, f"epoch {edit}", way, EDITED)


@pytest.mark.parametrize("way", ["peers", "k-sync:1", "local-sgd:2"])
@pytest.mark.parametrize("case", ["step convert", "epoch convert", "epoch shrink"])
def test_weights_of_another_dtype_or_shape_are_refused_by_name(
    tmp_path: Path, way: str, case: str
) -> None:
    assert_refused(tmp_path, case, way, MOVED)


@pytest.mark.parametrize("way", ["peers", "store"])
def test_a_layer_added_after_prepare_is_refused_by_name(tmp_path: Path, way: str) -> None:
    says = r"'3.1.weight' .* after prepare\(\)"
    assert_refused(tmp_path, "epoch new head", way, says)


@pytest.mark.parametrize("way", [one for one in WAYS if one != "local-sgd:2"])
def test_a_clamp_in_the_optimizer_step_holds(tmp_path: Path, way: str) -> None:
    """As the refusal advises: no weight is ever beyond the clamp."""
    plain = edits.CASES["clamped"](Plain())
    for result in results_of(tmp_path, "clamped", way):
        assert result["most"] <= edits.CLAMP + 1e-12
        if way in EXACT:
            assert differ(result, plain) < CLOSE


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["swap", "swap data"])
def test_weights_may_be_swapped_for_evaluation_between_epochs(
    tmp_path: Path, way: str, case: str
) -> None:
    results = results_of(tmp_path, case, way)
    assert all(bool(torch.isfinite(result["losses"]).all()) for result in results)
    assert torch.equal(results[0]["losses"], results[1]["losses"])


@pytest.mark.parametrize("way", ["store", "k-sync:1", "async"])
@pytest.mark.parametrize("case", ["swap inside", "swap data inside"])
def test_weights_may_be_swapped_for_evaluation_inside_an_epoch(
    tmp_path: Path, way: str, case: str
) -> None:
    results_of(tmp_path, case, way)


@pytest.mark.parametrize("way", EXACT)
@pytest.mark.parametrize("case", ["load first", "load first main"])
def test_state_loaded_before_the_first_epoch_is_used(tmp_path: Path, way: str, case: str) -> None:
    if case == "load first":
        assert_plain(tmp_path, case, way)
        return
    plain = edits.CASES["load first"](Plain())
    for result in results_of(tmp_path, case, way):
        assert differ(result, {name: plain[name] for name in result}) < CLOSE


@pytest.mark.parametrize("way", ["peers", "async"])
def test_a_loaded_optimizer_with_additional_state_is_refused_by_name(
    tmp_path: Path, way: str
) -> None:
    says = r"SGD keeps 'momentum_buffer'.* before prepare\(\)"
    assert_refused(tmp_path, "load momentum", way, says)


@pytest.mark.parametrize("way", ["peers", "store", "local-sgd:1"])
@pytest.mark.parametrize("case", ["unfreeze", "unfreeze momentum", "unfreeze unused"])
def test_parameters_may_be_unfrozen_and_frozen_again(tmp_path: Path, way: str, case: str) -> None:
    if way in EXACT:
        assert_plain(tmp_path, case, way)
        return
    first, second = results_of(tmp_path, case, way)
    torch.testing.assert_close(first["0.weight"], second["0.weight"])
    is_moved = not torch.equal(first["0.weight"], edits.make_net().state_dict()["0.weight"])
    assert is_moved == (case != "unfreeze unused")


@pytest.mark.parametrize("way", [*WAYS, LOCAL_COLLECTIVE])
@pytest.mark.parametrize("case", ["new buffers", "moved buffers"])
def test_replaced_buffers_are_synchronized(tmp_path: Path, way: str, case: str) -> None:
    first, second = results_of(tmp_path, case, way)
    assert differ(first, second) == 0.0
    assert float(first["mean"].abs().max()) > 0.0
    if way in EXACT:
        assert differ(first, edits.CASES[case](Plain())) < CLOSE


@pytest.mark.parametrize("way", ["peers", "store"])
def test_buffers_set_between_epochs_are_synchronized(tmp_path: Path, way: str) -> None:
    assert_plain(tmp_path, "reset statistics", way)


@pytest.mark.parametrize("way", ["peers", "store", "k-sync:1"])
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("add group", r"^optimizer\.add_param_group\(\) .* before prepare\(\).*requires_grad_"),
        ("read state", r"optimizer\.state_dict\(\)"),
        ("forget state", r"^optimizer\.state was replaced"),
        ("second inside", r"^SGD .*prepared.*its_optimizer"),
        ("second between", r"^SGD .*prepared.*its_optimizer"),
        ("tensor inside", r"^LBFGS .*prepared"),
    ],
)
def test_unsupported_changes_are_refused_by_name(
    tmp_path: Path, way: str, case: str, says: str
) -> None:
    assert_refused(tmp_path, case, way, says)


@pytest.mark.parametrize("way", ["peers", "async", "local-sgd:1"])
def test_tensors_outside_modules_may_be_optimized_between_epochs(tmp_path: Path, way: str) -> None:
    results_of(tmp_path, "tensor between", way)


@pytest.mark.parametrize("way", WAYS)
def test_copies_and_pickles_are_those_of_plain_torch(tmp_path: Path, way: str) -> None:
    results_of(tmp_path, "copies", way)


@pytest.mark.parametrize("way", ["peers", "k-sync:1", "local-sgd:1"])
def test_a_pickled_model_loads_without_paceline(tmp_path: Path, way: str) -> None:
    results_of(tmp_path, "saved", way)


def test_refusals_name_lines_that_can_be_written() -> None:
    assert re.search(EDITED, "parameter '0.weight' was changed x super().step(")
