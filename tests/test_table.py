"""The table of unit time: slots, bands, colours, and what runs as one."""

import pipeloom as pl
from pipeloom.drawing import slots, table


def timeline(name: str, ranks: int, microbatches: int) -> pl.Timeline:
    return pl.simulate(pl.schedules.make(name, ranks=ranks, microbatches=microbatches))


def test_idle_slots_and_long_actions() -> None:
    assert table(timeline("GPipe", 2, 1)).splitlines() == [
        "slot     0   1   2   3   4   5",
        "rank 0 | 0F0 .   .   .   0B0----",
        "rank 1 | .   1F0 1B0---- .   .",
    ]


def test_parts_of_a_composite_are_joined_even_where_one_waits() -> None:
    rows = "0F0,0F1,3F0,(0F2;3B0)OVERLAP_F_B,3F1,3B1,3F2,3B2,0B0,0B1,0B2\n"
    rows += "1F0,2F0,1F1,2F1,(1F2;2B0)OVERLAP_F_B,2F2,1B0,2B1,1B1,2B2,1B2\n"
    assert table(pl.simulate(pl.Schedule.from_csv(rows))).splitlines()[1:] == [
        "rank 0 | 0F0 0F1 .   3F0 0F2&3B0---- 3F1 3B1---- 3F2 3B2---- 0B0---- .   0B1---- .   .   0B2----",
        "rank 1 | .   1F0 2F0 1F1 2F1 1F2 .  &2B0---- 2F2 1B0---- 2B1---- 1B1---- 2B2---- 1B2---- .   .",
    ]


def test_bands_hold_all_slots_and_fit_the_width() -> None:
    whole = table(timeline("DualPipeV", 4, 10))
    for width in (1, 20, 80, 133, 10_000):
        bands = [band.splitlines() for band in table(timeline("DualPipeV", 4, 10), width).split("\n\n")]
        assert max(len(line) for band in bands for line in band) <= max(width, len("rank 0 | 0B0-"))
        column = 4
        for rank, line in enumerate(whole.splitlines()):
            parts = [band[rank][9:] for band in bands]
            longest = max(map(len, parts[:-1]), default=0)
            padded = "".join(part.ljust(-(-longest // column) * column) for part in parts)
            assert padded.rstrip() == line[9:]


def test_colours_change_nothing_else() -> None:
    plain = table(timeline("ZBVZeroBubble", 4, 8), 60)
    segments = list(slots(timeline("ZBVZeroBubble", 4, 8), 60))
    assert len({style for _, style in segments}) == 8  # F, I, W in two shades, idle, and none
    coloured = "".join(text for text, _ in segments)
    assert [line.rstrip() for line in coloured.splitlines()] == plain.splitlines()


def test_labels_line_up_from_ten_ranks_and_a_hundred_slots_on() -> None:
    lines = table(timeline("1F1B", 12, 40)).splitlines()
    assert lines[0].startswith("slot      0     1     2")
    assert lines[1].startswith("rank  0 | 0F0   0F1   0F2")
    assert lines[12].startswith("rank 11 | .     .     .")
