"""One way of running a model, timed without a separate process."""

import pytest

from paceline.bench.ways import TimedWay


@pytest.mark.parametrize("name", ["eager", "trace"])
def test_way_computes_the_output_of_the_model_and_is_timed(name: str) -> None:
    way = TimedWay(name, "chapter-mlp", batch_size=3, device="cpu", threads=1)
    built = way.prepare()
    assert built["max_difference"] == pytest.approx(0.0, abs=1e-5)
    assert 0 < float(str(built["first_call_s"])) <= float(str(built["settled_s"]))
    assert float(str(way.block(2)["seconds"])) > 0
    result = way.finish()
    assert set(result) == {"peak_bytes", "other_batches_s"}  # only torch.compile counts graphs
