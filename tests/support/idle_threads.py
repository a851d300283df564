"""Let idle OpenMP threads sleep in the tests and in the processes that the tests start.

By default an idle thread spins before it sleeps. Several processes with as many threads as cores then keep
each core busy with waiting, and small operations take up to four times as long. OpenMP reads the setting when
torch is loaded, so this module is imported before torch.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
