"""What tests of several rooms share; made once."""

from __future__ import annotations

import pytest

from tests.studio import Studio, build


@pytest.fixture(scope="session")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    return build(tmp_path_factory.mktemp("studio"))
