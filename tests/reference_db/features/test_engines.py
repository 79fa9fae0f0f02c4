"""Engines report to nobody."""

import subprocess
import sys


def test_nothing_is_reported_to_the_makers_of_an_engine() -> None:
    code = (
        "import sys; from reference_db.features.encoder import load_encoder; load_encoder(); "
        "names = [name for name, one in sys.modules.items() if one is not None]; "
        "print('openvino' in names, [name for name in names if name.startswith('openvino_telemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"
