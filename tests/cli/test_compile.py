"""``forerun compile`` goes through passes of the model, and waits for the trie."""

from support.saved_models import save_model
from typer.testing import CliRunner

from forerun.cli import app
from forerun.cli import compile as command


class FakeCompilation:
    waited = 0

    def wait(self, progress: object) -> None:
        type(self).waited += 1


def test_it_compiles_a_models_passes_and_waits_for_the_trie(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "compiled_before", lambda: False)
    monkeypatch.setattr(command, "Compilation", FakeCompilation)
    result = CliRunner().invoke(app, ["compile", "-m", str(save_model(tmp_path / "model"))])
    assert result.exit_code == 0, result.output
    assert "compiled in" in result.stderr and FakeCompilation.waited == 1
    assert CliRunner().invoke(app, ["compile", "-m", str(tmp_path / "none")]).exit_code == 2
