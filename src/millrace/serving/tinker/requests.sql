-- What a restarted server needs of the training API; docs/how-to/training-api.md explains it.

CREATE TABLE meta (
  key TEXT PRIMARY KEY,          -- 'position', always 0
  value INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE sessions (
  id TEXT PRIMARY KEY,
  tenant TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE samplers (
  id TEXT PRIMARY KEY,
  tenant TEXT NOT NULL,
  session TEXT,                  -- NULL: of weights that were not saved under a name
  folder TEXT                    -- of its adapter, within --train-dir; NULL: the base model
) WITHOUT ROWID;
CREATE TABLE requests (
  number INTEGER PRIMARY KEY,    -- in the order of acceptance
  id TEXT NOT NULL UNIQUE,       -- of its future
  tenant TEXT NOT NULL,
  operation TEXT NOT NULL,
  owner TEXT NOT NULL,           -- the session, model or sampler whose client numbered it
  seq_id INTEGER NOT NULL,       -- that number
  body BLOB,                     -- NULL: it is never executed again
  result BLOB                    -- protobuf, or JSON as text; NULL: not executed yet
);
CREATE INDEX requests_of_owner ON requests (owner, seq_id);
