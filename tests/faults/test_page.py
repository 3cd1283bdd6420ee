"""Every row of docs/faults.md has a test here, and every listed test exists."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "faults.md"

SHOWN_BY: dict[str, tuple[str, str]] = {
    "a checkpoint or the trace is another run's": (
        "faults/test_tampered.py",
        "test_the_runs_own_previous_checkpoint_is_used_with_a_note",
    ),
    "a checkpoint or a settings file holds impossible values": (
        "faults/test_tampered.py",
        "test_a_malicious_settings_file_is_refused_in_a_short_message",
    ),
    "a file or a folder may not be read or written": (
        "faults/test_permissions.py",
        "test_a_file_that_may_not_be_opened_is_named",
    ),
    "a link, a pipe or a folder": (
        "faults/test_folders.py",
        "test_a_new_run_writes_through_no_planted_file",
    ),
    "a worker is killed": (
        "faults/test_live_faults.py",
        "test_a_killed_worker_does_not_change_the_result",
    ),
    "a worker is killed while it saves a model": (
        "faults/test_folders.py",
        "test_partial_files_of_the_dead_are_removed_and_those_of_the_living_kept",
    ),
    "it is killed inside an all-reduce": (
        "faults/test_collective.py",
        "test_a_death_inside_an_all_reduce_restarts_a_run_with_respawn",
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
        "test_a_death_among_sums_in_the_loop_ends_or_restarts_the_run",
    ),
    "it is killed among ranks": (
        "engines/test_torchrun.py",
        "test_a_killed_rank_resumes_inside_an_epoch",
    ),
    "its machine is gone among ranks": (
        "engines/test_rank_group.py",
        "test_a_lost_machine_is_reported_and_a_closed_connection_is_not",
    ),
    "it is killed where a model is split": (
        "spread/test_runs.py",
        "test_killed_split_run_names_one_cause_and_anyone_can_resume_it",
    ),
    "it is stopped": (
        "faults/test_live_faults.py",
        "test_a_stopped_worker_that_others_wait_for_is_given_up",
    ),
    "it is busy": ("faults/test_busy.py", "test_a_worker_busy_for_minutes_is_not_ended"),
    "it hangs asleep": (
        "faults/test_busy.py",
        "test_a_worker_asleep_between_epochs_is_ended_with_a_stall_limit",
    ),
    "it is slow": ("faults/test_slow.py", "test_a_slow_worker_is_named_with_its_cost"),
    "its script raises": (
        "faults/test_live_faults.py",
        "test_an_exception_counts_as_a_death_with_on_worker_error_continue",
    ),
    "all workers die": (
        "faults/test_all_gone.py",
        "test_the_run_restarts_from_the_newest_checkpoint",
    ),
    "the launcher is killed": (
        "faults/test_orphans.py",
        "test_no_process_or_memory_is_left_when_a_parent_is_killed",
    ),
    "the checkpoints' writer": (
        "checkpoints/test_writer.py",
        "test_a_run_with_a_stopped_writer_ends_with_correct_checkpoints",
    ),
    "you stop the run": (
        "faults/test_curfew.py",
        "test_a_worker_busy_between_epochs_still_copies_the_end",
    ),
    "the disk is full": (
        "faults/test_output.py",
        "test_a_temporarily_full_disk_loses_nothing",
    ),
    "memory runs out": (
        "faults/test_room.py",
        "test_a_worker_killed_by_the_kernel_for_memory_is_named_with_the_limit",
    ),
    "nobody reads": (
        "faults/test_output.py",
        "test_training_continues_when_the_outputs_reader_is_gone",
    ),
    "the run's folder is deleted": (
        "faults/test_output.py",
        "test_a_deleted_run_folder_exists_again_at_the_end",
    ),
    "the last checkpoint": (
        "faults/test_output.py",
        "test_an_end_saved_outside_an_unwritable_folder_can_be_resumed",
    ),
    "the worker that copies": (
        "faults/test_last_moments.py",
        "test_another_worker_copies_the_end_when_the_assigned_one_dies",
    ),
    "two runs in one folder": (
        "launch/test_one_at_a_time.py",
        "test_a_second_run_in_a_folder_is_refused_and_changes_nothing",
    ),
    "it is killed, stopped or hangs where each worker keeps": (
        "script/test_sticky.py",
        "test_a_death_ends_the_run",
    ),
    "a run is killed before": (
        "launch/test_one_at_a_time.py",
        "test_resume_auto_starts_anew_after_a_kill_before_the_first_checkpoint",
    ),
}
"""How a row of the first table begins -> the test of it."""
FORMS: dict[str, tuple[str, str]] = {
    "kill worker": (
        "faults/test_live_faults.py",
        "test_a_killed_worker_does_not_change_the_result",
    ),
    "stop worker": (
        "faults/test_live_faults.py",
        "test_a_stop_goes_unnoticed_where_no_worker_waits",
    ),
    "slow worker": (
        "faults/test_live_faults.py",
        "test_slow_phases_and_late_pushes_do_not_change_the_result",
    ),
    "raise in": (
        "faults/test_live_faults.py",
        "test_an_exception_ends_the_run_by_default",
    ),
    "drop push": (
        "faults/test_live_faults.py",
        "test_a_lost_push_is_repeated_by_another_worker",
    ),
    "delay push": (
        "faults/test_live_faults.py",
        "test_slow_phases_and_late_pushes_do_not_change_the_result",
    ),
    "kill launcher": (
        (
            "faults/test_orphans.py",
            "test_a_run_whose_launcher_was_killed_by_a_fault_can_be_resumed",
        )
    ),
    "fill disk": ("faults/test_orphans.py", "test_a_full_disk_does_not_end_a_run"),
    "corrupt": ("faults/test_orphans.py", "test_a_flipped_bit_in_the_trace_is_found_at_the_end"),
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
def test_every_row_of_the_page_has_a_test(title: str, shown_by: dict[str, tuple[str, str]]) -> None:
    rows = rows_of(title)
    assert len(rows) == len(shown_by)
    assert [row for row in rows if not row.startswith(tuple(shown_by))] == []


@pytest.mark.parametrize(("name", "function"), sorted({*SHOWN_BY.values(), *FORMS.values()}))
def test_every_listed_test_exists(name: str, function: str) -> None:
    tree = ast.parse((TESTS / name).read_text())
    assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
