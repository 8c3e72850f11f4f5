import subprocess
import sys


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'datasets', 'PIL', 'av', 'numpy', 'transformers'}"
    code = f"import sys, coat_data; sys.exit(str({heavy} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stderr.strip() == "set()"
