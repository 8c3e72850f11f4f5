import subprocess
import sys

import pytest

import coat_data


def test_every_public_name_can_be_imported() -> None:
    for name in coat_data.__all__:
        assert getattr(coat_data, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = coat_data.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'datasets', 'PIL', 'av', 'numpy', 'transformers'}"
    code = f"import sys, coat_data; sys.exit(str({heavy} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stderr.strip() == "set()"
