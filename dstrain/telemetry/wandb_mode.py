"""Whether a run is recorded in W&B: `telemetry.wandb`, and for `auto` what the user has told wandb itself.

Read without importing wandb, which takes seconds: its environment variables, its settings files (`wandb offline` writes
one) and the key that `wandb login` leaves in ~/.netrc.
"""

import configparser
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

MODES = ("online", "offline", "disabled")
PUBLIC_HOST = "api.wandb.ai"
HOW = "WANDB_API_KEY or `wandb login`"


def resolve_mode(asked: str, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """asked: auto or one of MODES -> one of MODES, and a line that says so, empty where nobody needs to hear it.

    auto: WANDB_MODE, else the mode in wandb's settings, else online with a key and disabled without one. Online without
    a key becomes offline, so that nothing is lost.
    """
    settings = _settings(environment)
    mode, why = asked, f"telemetry.wandb={asked}"
    if asked == "auto":
        for said, where in ((environment.get("WANDB_MODE"), "WANDB_MODE"), (settings.get("mode"), "wandb's settings")):
            if said and said not in MODES:
                return "disabled", f"WARNING: wandb: disabled, {where} is {said!r} (valid: {', '.join(MODES)})"
            if said:
                mode, why = said, f"{where}={said}"
                break
    url = environment.get("WANDB_BASE_URL") or settings.get("base_url") or f"https://{PUBLIC_HOST}"
    has_key = mode in ("auto", "online") and _has_key(url, environment)
    if mode == "auto":
        if has_key:
            return "online", ""
        return "disabled", f"wandb: disabled, there is no key for {url} ({HOW}); telemetry.wandb=offline needs none"
    if mode == "online" and not has_key:
        return "offline", f"WARNING: wandb: {why}, but there is no key for {url} ({HOW}); recording offline"
    return mode, f"wandb: disabled by {why}" if mode == "disabled" and asked == "auto" else ""


def default_project(environment: Mapping[str, str] = os.environ) -> str | None:
    """The project where the configuration names none; null where wandb knows one."""
    return None if environment.get("WANDB_PROJECT") or _settings(environment).get("project") else "dstrain"


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Of wandb's settings files: the user's, and on top of it the current folder's."""
    home = environment.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    found: dict[str, str] = {}
    for path in (Path(home).expanduser() / "settings", Path("wandb/settings")):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(path)
        except (OSError, configparser.Error, UnicodeDecodeError):
            continue  # wandb itself takes a file that it cannot read as empty
        if parser.has_section("default"):
            found |= dict(parser.items("default"))
    return found


def _has_key(url: str, environment: Mapping[str, str]) -> bool:
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    path = Path(environment.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(path).authenticators(urlsplit(url).netloc) is not None
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False
