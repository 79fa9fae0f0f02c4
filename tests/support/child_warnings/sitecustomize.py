"""Makes a deprecated call of ours an error in the processes that tests start: Python imports this file at their start.

pyproject.toml says the same to pytest; tests/conftest.py adds this folder to PYTHONPATH.
"""

import warnings

OURS = (
    r"(monitor|reference_db|tests|training|evaluation|benches|evaluate|train_encoder|train_vsal|fit_confidence|bench"
    r"|broker|chaos|lock|check_advisories|__main__)(\.|$)"
)
CATEGORIES = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)

for category in CATEGORIES:
    warnings.filterwarnings("error", category=category, module=OURS)
