"""An export as lines of plain text; this module must not know how it was made."""

from .exporting import Export
from .lines import duration, quartiles, size, table


def render_export(one: Export) -> list[str]:
    """What was written, then its latency."""
    differences = ", ".join(
        f"{value:.1e} (batch {batch})" for batch, value in one.differences.items()
    )
    rows = [
        (f"batch {each.batch}, {name}", duration(timing.median_s), quartiles(timing))
        for each in one.latencies
        for name, timing in (("model, eager", each.model), ("file", each.file))
    ]
    return [
        f"wrote        {one.path} ({one.form}, {one.precision.value})",
        f"size         {size(one.num_bytes)} on disk; the weights are {size(one.weights_bytes)}",
        f"equal        largest difference of an output: {differences}",
        f"accuracy     {_accuracy(one)}",
        "",
        *table(("latency", "median", "middle half"), rows),
        *([f"note: not as {one.fell_back}"] if one.fell_back else []),
    ]


def _accuracy(one: Export) -> str:
    if one.accuracy is None or one.file_accuracy is None:
        if not one.is_trained:
            return "not measured: the weights are fresh; give --checkpoint RUN"
        return "not measured: there is no test data"
    change = one.file_accuracy - one.accuracy
    return (
        f"{one.file_accuracy:.4f} (the float32 model {one.accuracy:.4f}, change {change:+.4f}; "
        f"{one.accuracy_samples:,} test samples)"
    )
