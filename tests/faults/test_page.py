"""Every row of docs/faults.md has a test here, and every test that it is said to have exists."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "faults.md"

SHOWN_BY: dict[str, tuple[str, str]] = {
    "a checkpoint or the trace is another run's": (
        "faults/test_tampered.py",
        "test_the_own_one_before_it_is_taken_with_a_note",
    ),
    "a checkpoint or a settings file holds impossible values": (
        "faults/test_tampered.py",
        "test_a_settings_file_that_is_meant_to_hurt",
    ),
    "a file or a folder may not be read or written": (
        "faults/test_permissions.py",
        "test_what_may_not_be_opened_is_named",
    ),
    "a link, a pipe or a folder": (
        "faults/test_folders.py",
        "test_a_new_run_writes_through_nothing_that_is_planted",
    ),
    "a worker is killed": ("faults/test_live_faults.py", "test_a_killed_worker_changes_nothing"),
    "a worker is killed while it saves a model": (
        "faults/test_folders.py",
        "test_what_was_half_written_goes_and_what_is_being_written_stays",
    ),
    "it is killed inside an all-reduce": (
        "faults/test_collective.py",
        "test_inside_an_all_reduce_a_run_with_respawn_begins_again",
    ),
    "it is killed under full-sync": (
        "script/test_optimizers.py",
        "test_a_lockstep_run_with_respawn_restarts_from_its_checkpoint",
    ),
    "it is killed where all workers make each step together": (
        "script/test_closures.py",
        "test_a_death_ends_the_run_and_names_the_cause",
    ),
    "it is killed where a script sums inside its loop": (
        "faults/test_all_gone.py",
        "test_a_death_among_sums_in_the_loop_ends_the_run_or_begins_it_again",
    ),
    "it is killed among ranks": (
        "engines/test_torchrun.py",
        "test_what_is_killed_goes_on_in_the_middle_of_an_epoch",
    ),
    "its machine is gone among ranks": (
        "engines/test_rank_group.py",
        "test_a_machine_that_is_gone_is_told_of_and_an_end_is_left_to_others",
    ),
    "it is killed where a model is split": (
        "spread/test_runs.py",
        "test_a_split_run_dies_with_one_cause_and_its_checkpoints_are_anyones",
    ),
    "it is stopped": (
        "faults/test_live_faults.py",
        "test_a_stopped_worker_that_others_wait_for_is_given_up",
    ),
    "it is busy": ("faults/test_busy.py", "test_nobody_is_ended_who_was_busy_for_minutes"),
    "it hangs asleep": (
        "faults/test_busy.py",
        "test_between_epochs_a_sleeper_is_ended_where_a_time_was_given",
    ),
    "it is slow": ("faults/test_slow.py", "test_a_slow_worker_is_named"),
    "its script raises": (
        "faults/test_live_faults.py",
        "test_an_exception_is_a_death_where_the_run_is_to_continue",
    ),
    "all workers die": (
        "faults/test_all_gone.py",
        "test_the_run_goes_on_from_the_newest_checkpoint",
    ),
    "the launcher is killed": (
        "faults/test_orphans.py",
        "test_nothing_is_left_when_a_parent_is_killed",
    ),
    "the checkpoints' writer": (
        "checkpoints/test_writer.py",
        "test_a_run_whose_writer_is_stopped_ends_with_checkpoints_that_are_true",
    ),
    "you stop the run": (
        "faults/test_curfew.py",
        "test_who_is_busy_between_epochs_copies_the_end_all_the_same",
    ),
    "the disk is full": (
        "faults/test_output.py",
        "test_a_disk_that_is_full_for_a_while_costs_nothing",
    ),
    "memory runs out": (
        "faults/test_room.py",
        "test_who_is_ended_by_the_kernel_for_memory_is_named_with_the_limit",
    ),
    "nobody reads": (
        "faults/test_output.py",
        "test_who_read_the_output_is_gone_and_training_goes_on",
    ),
    "the run's folder is deleted": (
        "faults/test_output.py",
        "test_a_folder_that_was_deleted_is_there_again_at_the_end",
    ),
    "the last checkpoint": (
        "faults/test_output.py",
        "test_where_the_folder_takes_nothing_the_end_lies_elsewhere_and_goes_on",
    ),
    "the worker that copies": (
        "faults/test_last_moments.py",
        "test_another_copies_the_end_when_the_worker_dies_that_was_to",
    ),
    "two runs in one folder": (
        "launch/test_one_at_a_time.py",
        "test_a_second_run_gets_one_sentence_and_changes_nothing",
    ),
    "it is killed, stopped or hangs where each worker keeps": (
        "script/test_sticky.py",
        "test_a_death_ends_the_run",
    ),
    "a run is killed before": (
        "launch/test_one_at_a_time.py",
        "test_auto_begins_anew_after_a_kill_before_the_first_checkpoint",
    ),
}
"""How a row of the first table begins -> the test of it."""
FORMS: dict[str, tuple[str, str]] = {
    "kill worker": ("faults/test_live_faults.py", "test_a_killed_worker_changes_nothing"),
    "stop worker": ("faults/test_live_faults.py", "test_nobody_notices_a_stop_where_nobody_waits"),
    "slow worker": (
        "faults/test_live_faults.py",
        "test_slow_phases_and_late_pushes_change_nothing",
    ),
    "raise in": (
        "faults/test_live_faults.py",
        "test_an_exception_ends_the_run_unless_told_otherwise",
    ),
    "drop push": (
        "faults/test_live_faults.py",
        "test_a_push_that_is_lost_is_made_again_by_another",
    ),
    "delay push": ("faults/test_live_faults.py", "test_slow_phases_and_late_pushes_change_nothing"),
    "kill launcher": (
        (
            "faults/test_orphans.py",
            "test_a_launcher_that_was_ordered_to_die_leaves_a_run_that_goes_on",
        )
    ),
    "fill disk": ("faults/test_orphans.py", "test_a_full_disk_ends_no_run"),
    "corrupt": ("faults/test_orphans.py", "test_a_bit_that_flips_in_the_trace_is_found_at_the_end"),
}
"""How a form of ``--fault`` begins -> the test of it."""


def rows_of(title: str) -> list[str]:
    """The first cells of the table whose first column has this title."""
    lines = iter(PAGE.read_text().splitlines())
    for line in lines:
        if line.startswith(f"| {title} |"):
            break
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("| "):
            return rows
        rows.append(line.split(" | ")[0][2:].strip("`"))
    return rows


@pytest.mark.parametrize(("title", "shown_by"), [("what", SHOWN_BY), ("form", FORMS)])
def test_every_row_has_its_test_and_no_test_is_of_no_row(
    title: str, shown_by: dict[str, tuple[str, str]]
) -> None:
    rows = rows_of(title)
    assert len(rows) == len(shown_by)
    assert [row for row in rows if not row.startswith(tuple(shown_by))] == []


@pytest.mark.parametrize(("name", "function"), sorted({*SHOWN_BY.values(), *FORMS.values()}))
def test_the_tests_exist(name: str, function: str) -> None:
    tree = ast.parse((TESTS / name).read_text())
    assert function in [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
