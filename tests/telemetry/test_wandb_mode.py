"""What `telemetry.wandb` leads to, for what users may have set; what that means is from wandb's documentation."""

import pytest

from dstrain.telemetry.wandb_mode import default_project, resolve_mode

KEY = {"WANDB_API_KEY": "0" * 40}


@pytest.fixture
def nothing(tmp_path, monkeypatch):
    """An environment where nobody has ever used wandb, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path / "config")}


@pytest.mark.parametrize("asked, environment, mode, line", [
    ("auto", {}, "disabled", "wandb: disabled, there is no key for https://api.wandb.ai (WANDB_API_KEY or `wandb"),
    ("auto", KEY, "online", ""),
    ("auto", {"WANDB_IDENTITY_TOKEN_FILE": "token"}, "online", ""),
    ("auto", KEY | {"WANDB_MODE": "offline"}, "offline", ""),
    ("auto", KEY | {"WANDB_MODE": "disabled"}, "disabled", "wandb: disabled by WANDB_MODE=disabled"),
    ("auto", {"WANDB_MODE": "online"}, "offline", "WARNING: wandb: WANDB_MODE=online, but there is no key for"),
    ("auto", KEY | {"WANDB_MODE": "on"}, "disabled", "WARNING: wandb: disabled, WANDB_MODE is 'on' (valid: online, "),
    ("online", KEY | {"WANDB_MODE": "disabled"}, "online", ""),
    ("online", {}, "offline", "WARNING: wandb: telemetry.wandb=online, but there is no key for https://api.wandb.ai"),
    ("offline", {}, "offline", ""),
    ("offline", KEY | {"WANDB_MODE": "online"}, "offline", ""),
    ("disabled", KEY, "disabled", ""),
])
def test_modes(nothing, asked, environment, mode, line):
    found, said = resolve_mode(asked, nothing | environment)
    assert found == mode and said.startswith(line) and bool(said) == bool(line)


def test_the_key_that_wandb_login_leaves_is_one_for_its_host_alone(nothing, tmp_path):
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "0" * 40 + "\n")
    assert resolve_mode("auto", nothing)[0] == "online"
    own = nothing | {"WANDB_BASE_URL": "https://wandb.example:8080"}
    assert resolve_mode("auto", own)[0] == "disabled" and "https://wandb.example:8080" in resolve_mode("auto", own)[1]
    (tmp_path / "netrc").write_text("machine wandb.example:8080 login user password " + "0" * 40 + "\n")
    assert resolve_mode("auto", own)[0] == "online"
    assert resolve_mode("auto", nothing)[0] == "disabled"
    (tmp_path / "netrc").write_bytes(b"machine \xff\xfe what is this\n")
    assert resolve_mode("auto", nothing)[0] == "disabled"


def test_wandbs_settings_files_count_for_auto_and_the_environment_goes_before_them(nothing, tmp_path):
    for folder, text in (("config", "mode = online\nbase_url = https://own.example\n"), ("wandb", "mode = offline\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "settings").write_text(f"[default]\n{text}")
    assert resolve_mode("auto", nothing | KEY) == ("offline", "")
    assert resolve_mode("auto", nothing | KEY | {"WANDB_MODE": "disabled"})[0] == "disabled"
    assert "https://own.example" in resolve_mode("online", nothing)[1]
    (tmp_path / "wandb" / "settings").write_text("no section = of any kind\n")
    assert resolve_mode("auto", nothing | KEY)[0] == "online"


def test_the_project_is_dstrain_where_wandb_knows_no_other(nothing, tmp_path):
    assert default_project(nothing) == "dstrain"
    assert default_project(nothing | {"WANDB_PROJECT": "mine"}) is None
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "settings").write_text("[default]\nproject = mine\n")
    assert default_project(nothing) is None
