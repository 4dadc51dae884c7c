# SPDX-License-Identifier: Apache-2.0
"""The order in which settings are tried."""

import math
from typing import Any

from pyro_dvi.analysis.tuning.trainings import Trainings, with_value
from pyro_dvi.core.arguments import check_choice
from pyro_dvi.errors import MissingLibraryError


def one_after_the_other(done: Trainings, spare: int) -> None:
    """Search one list after another; spare runs extend lists beyond their ends, then try neighbours of the best."""
    best, searched = tuple(values[(len(values) - 1) // 2] for values in done.lists.values()), None
    while searched != best:
        again, searched = searched is not None, best
        for i, values in enumerate(done.lists.values()):
            for value in done.neighbours(i) if again else values:
                if again and not spare:
                    return
                spare -= again and with_value(best, i, value) not in done.results
                done.add(with_value(best, i, value))
            best = done.choice() if done.scores else best
            while spare and (following := done.beyond(i)) is not None:
                done.add(with_value(best, i, following))
                best, spare = done.choice(), spare - 1


def as_proposed(done: Trainings, sampler: Any, max_trainings: int) -> None:
    """Train with the settings that an Optuna sampler proposes, after it has received the results in the file."""
    try:
        import optuna
    except ImportError as error:
        raise MissingLibraryError('sampler= needs Optuna: python -m pip install "pyro-dvi[tune]"') from error
    check_choice("sampler", sampler, optuna.samplers.BaseSampler, "optuna.samplers.TPESampler(seed=0)")

    def objective(trial: Any) -> float:
        key = tuple(trial.suggest_categorical(name, values) for name, values in done.lists.items())
        done.add(key)
        if len(done.results) >= max_trainings:
            trial.study.stop()
        return float(done.scores[key].mean()) if key in done.scores else math.nan

    before = optuna.logging.get_verbosity()
    # The progress bar and the table report training runs.
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    try:
        study = optuna.create_study(sampler=sampler)
        for key in filter(done.is_listed, done.recorded):
            study.enqueue_trial(done.named(key))
        study.optimize(objective, n_trials=len(done.recorded) + max_trainings)
    finally:
        optuna.logging.set_verbosity(before)
