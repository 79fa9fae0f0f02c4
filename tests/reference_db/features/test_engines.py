"""Engines send no telemetry."""

import subprocess
import sys


def test_openvino_is_loaded_without_its_telemetry() -> None:
    code = (
        "import sys; from reference_db.features.encoder import load_encoder; load_encoder(); "
        "names = [name for name, one in sys.modules.items() if one is not None]; "
        "print('openvino' in names, [name for name in names if name.startswith('openvino_telemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"
