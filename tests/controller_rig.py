"""Makes dispatchers whose player, scorers and buffer are given by a test."""

from typing import Any

from fakes import FakeScorers, FakeTasks, ScriptedEngine

from millrace.controller.admission import Admission
from millrace.controller.dispatcher import Dispatcher
from millrace.controller.group_tracker import GroupTracker
from millrace.environments.rollouts.partial_rollouts import PartialRollouts
from millrace.journal import NoJournal


def make_tracker(admission: Admission, **changes: Any) -> GroupTracker:
    settings: dict[str, Any] = {
        "tasks": FakeTasks(),
        "journal": NoJournal(),
        "solved_at": 1.0,
        "max_failure_share": 0.5,
        "max_filtered_share": 1.0,
        "warn": print,
    }
    return GroupTracker(admission=admission, **{**settings, **changes})


def make_dispatcher(
    tracker: GroupTracker, *, player: Any, buffer: Any, **changes: Any
) -> Dispatcher:
    """`player` needs play_for_training(), `buffer` admit() only."""
    settings: dict[str, Any] = {
        "scorers": FakeScorers(),
        "admission": tracker.admission,
        "partials": PartialRollouts(NoJournal(), every_s=0),
        "engines": ScriptedEngine(),
        "group_size": 2,
    }
    return Dispatcher(tracker=tracker, player=player, buffer=buffer, **{**settings, **changes})
