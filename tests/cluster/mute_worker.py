"""A worker for tests that never says Hello."""

import time

time.sleep(3600)
