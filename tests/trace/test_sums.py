"""A line that was changed, lost, added or moved is found by its checksum."""

import io

import pytest

from paceline.trace.records import opened, seal, sound_part

BODIES = [f'{{"kind":"note","t":{t}.0' for t in range(4)]


def sealed(bodies: list[str]) -> list[bytes]:
    lines, total = [], 0
    for body in bodies:
        line, total = seal(body, total)
        lines.append(line.encode())
    return lines


def test_a_sealed_line_is_opened_again() -> None:
    total = 0
    for body, line in zip(BODIES, sealed(BODIES), strict=True):
        result, total = opened(line, total)
        assert result.decode() == body


LINES = sealed(BODIES)


@pytest.mark.parametrize(
    ("damaged", "num_sound"),
    [
        ([LINES[0], LINES[1].replace(b"1.0", b"1.5"), *LINES[2:]], 1),
        ([LINES[0], *LINES[2:]], 1),
        ([LINES[0], LINES[0], *LINES[1:]], 1),
        ([LINES[0], LINES[2], LINES[1], LINES[3]], 1),
        ([*LINES[:3], LINES[3][:-4]], 3),
        (LINES, 4),
    ],
)
def test_a_trace_is_intact_up_to_the_damage(damaged: list[bytes], num_sound: int) -> None:
    num_bytes, _ = sound_part(io.BytesIO(b"".join(damaged)), 1 << 20)
    assert num_bytes == sum(map(len, LINES[:num_sound]))


def test_a_line_that_ends_after_the_limit_is_not_counted() -> None:
    num_bytes, _ = sound_part(io.BytesIO(b"".join(LINES)), len(LINES[0]) + 5)
    assert num_bytes == len(LINES[0])
