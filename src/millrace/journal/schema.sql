-- The tables of a journal; docs/journal.md explains them.

CREATE TABLE meta (
  key TEXT PRIMARY KEY,          -- 'format_version', 'position', 'covered_version'
  value INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE tasks (
  number INTEGER PRIMARY KEY,    -- position in the run's task stream, from 0, without gaps
  status TEXT NOT NULL,          -- running, waiting, training, trained, dropped, failed, unknown
  reason TEXT,                   -- why it was dropped or failed
  version INTEGER,               -- the step that trained it made this version
  draw INTEGER,                  -- row of the dataset that a curriculum drew for it
  tries INTEGER NOT NULL DEFAULT 0,  -- attempts before the current one; they became too stale
  admitted INTEGER               -- position of the journal when its group was admitted
);
CREATE INDEX open_tasks ON tasks (number) WHERE status IN ('running', 'waiting', 'training');
CREATE TABLE groups (
  number INTEGER PRIMARY KEY,    -- a task that is waiting, or in a step that may be redone
  payload BLOB NOT NULL,
  checksum BLOB NOT NULL         -- XXH3-64 of the payload
);
CREATE TABLE steps (
  version INTEGER PRIMARY KEY,   -- the version of the weights that the step makes
  status TEXT NOT NULL           -- begun, applied, or skipped: an update of it was not finite
);
CREATE TABLE step_groups (
  version INTEGER NOT NULL,
  place INTEGER NOT NULL,        -- order within the step
  number INTEGER NOT NULL,
  replayed INTEGER NOT NULL,     -- 1: an earlier step has trained it, too
  PRIMARY KEY (version, place)
) WITHOUT ROWID;
CREATE TABLE partials (
  id INTEGER PRIMARY KEY,        -- in the order of sampling
  number INTEGER NOT NULL,       -- a task that is running
  request TEXT NOT NULL,
  digest TEXT NOT NULL,          -- of everything that the answer depends on
  member INTEGER NOT NULL,       -- which completion of the request
  start INTEGER NOT NULL,        -- tokens of the completion before these
  num_tokens INTEGER NOT NULL,
  payload BLOB NOT NULL,
  checksum BLOB NOT NULL
);
CREATE INDEX partials_of_task ON partials (number);
CREATE TABLE observations (
  position INTEGER PRIMARY KEY,  -- of the journal
  number INTEGER NOT NULL,
  draw INTEGER NOT NULL,
  solve_rate REAL NOT NULL
);
