"""The trials of a search, in a file that a killed process leaves whole."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from demask.errors import BadInput
from demask.failures import described
from demask.files.atomic_write import check_writable
from demask.prune.searching.proposals import quiet_optuna
from demask.prune.searching.trial import SearchTrial, cost_of

JOURNALS, DATABASES = (".journal", ".log"), (".db", ".sqlite", ".sqlite3")
JOURNAL_START = b'{"op_code"'
STUDY, IDENTITY, TRIAL = "demask prune", "demask search", "demask trial"  # names in the file


class TrialStore:
    """An Optuna study that holds finished trials alone: each is added at once, whole.

    What ran when a process was killed is not in it, and runs again.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any]):
        """Open or create the study.

        path: a journal (.journal, .log) or an SQLite database (.db, .sqlite, .sqlite3); None for
        memory. identity: JSON values that say which search this is. Raises BadInput for a file of
        another search, or that holds something else.
        """
        self.cost, self.budget = str(identity["cost"]), identity["budget"]
        directions = ["maximize", "minimize"] if self.budget is None else ["maximize"]
        with quiet_optuna() as optuna:
            self._optuna = optuna
            try:
                self._storage = None if path is None else _storage(optuna, path)
                self._study = _study(optuna, self._storage, directions)
            except BadInput:
                raise
            except Exception as error:  # of SQLAlchemy, JSON or Optuna: not such a file
                raise _not_of_a_search(path or Path(), described(error)) from error
        stored = self._study.user_attrs.get(IDENTITY)
        if stored is None:
            self._study.set_user_attr(IDENTITY, dict(identity))
        elif stored != identity:
            names = [name for name in identity if stored.get(name) != identity[name]]
            raise BadInput(
                f"{path} is of another search ({', '.join(names)} differ): give another "
                "file, or the arguments of that search"
            )

    def trials(self) -> dict[int, SearchTrial]:
        """The finished trials by number; of two with one number, the first."""
        trials: dict[int, SearchTrial] = {}
        for stored in self._study.get_trials(deepcopy=False):
            values = stored.user_attrs.get(TRIAL)
            if values is not None:
                trials.setdefault(values["number"], SearchTrial(**values))
        return trials

    def add(self, trial: SearchTrial) -> None:
        """Add a finished trial."""
        optuna = self._optuna
        fits = trial.accuracy is not None
        values = [trial.accuracy, *([] if self.budget else [cost_of(self.cost, trial)])]
        most = {name: max(n, 1) for name, n in trial.removed.items()}
        space = {name: optuna.distributions.IntDistribution(0, n) for name, n in most.items()}
        state = optuna.trial.TrialState
        self._study.add_trial(
            optuna.trial.create_trial(
                state=state.COMPLETE if fits else state.PRUNED,
                values=values if fits else None,
                params=dict(trial.removed),
                distributions=space,
                user_attrs={TRIAL: asdict(trial)},
            )
        )

    def remember(self, name: str, values: dict[str, Any]) -> None:
        """Store JSON values by name."""
        self._study.set_user_attr(name, values)

    def recall(self, name: str) -> dict[str, Any] | None:
        """The values stored by name, or None."""
        return self._study.user_attrs.get(name)

    def close(self) -> None:
        """Close the connection to a database."""
        engine = getattr(getattr(self._storage, "_backend", self._storage), "engine", None)
        if engine is not None:
            engine.dispose()


def _study(optuna: Any, storage: Any, directions: list[str]) -> Any:
    """The stored study, or a new one."""
    if storage is not None:
        try:
            return optuna.load_study(study_name=STUDY, storage=storage)
        except KeyError:  # a new file
            pass
    return optuna.create_study(study_name=STUDY, storage=storage, directions=directions)


def _storage(optuna: Any, path: Path) -> Any:
    final = check_writable(path)
    if final.suffix in DATABASES:
        _check_database(final, path)
        return optuna.storages.RDBStorage(f"sqlite:///{final}")
    if final.suffix not in JOURNALS:
        known = ", ".join((*JOURNALS, *DATABASES))
        raise BadInput(f"expected a storage that ends in {known}, got {path}")
    if final.exists():
        _check_journal(final, path)
        _drop_broken_line(final)
    backend = optuna.storages.journal.JournalFileBackend(str(final))
    return optuna.storages.JournalStorage(backend)


def _check_database(final: Path, path: Path) -> None:
    """Raise BadInput for an existing file that is no database, or one of other tables alone."""
    if not final.exists() or not final.stat().st_size:
        return
    try:
        with closing(sqlite3.connect(f"{final.as_uri()}?mode=ro", uri=True)) as database:
            rows = database.execute("select name from sqlite_master where type = 'table'")
            tables = {name for (name,) in rows}
    except sqlite3.Error as error:
        raise _not_of_a_search(path, str(error)) from error
    if tables and "studies" not in tables:
        raise _not_of_a_search(path, f"it has the tables {', '.join(sorted(tables)[:3])}")


def _check_journal(final: Path, path: Path) -> None:
    """Raise BadInput for an existing file that does not start as journals of Optuna do."""
    with final.open("rb") as file:
        start = file.read(len(JOURNAL_START))
    if not JOURNAL_START.startswith(start):
        raise _not_of_a_search(path, f"it starts with {start[:20]!r}")


def _not_of_a_search(path: Path, reason: str) -> BadInput:
    return BadInput(f"cannot read {path} as the trials of a search ({reason}); give another file")


def _drop_broken_line(path: Path) -> None:
    """Cut off a last line without its end: that of a process killed while it wrote. Optuna would
    write the next line after it, and read neither."""
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        length = min(size, 1 << 24)
        file.seek(size - length)
        file.truncate(size - length + file.read().rfind(b"\n") + 1)
