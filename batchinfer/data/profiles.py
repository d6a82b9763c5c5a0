"""Keys of an AWS profile: obstore looks into the environment and asks the machine's role, but reads no profile."""

import configparser
import os
from pathlib import Path

from batchinfer.records import ConfigError
from batchinfer.sanitize import first_line

# what obstore itself finds; a key in the environment goes before a profile, as in AWS's own libraries
_OTHER_SOURCES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def profile_keys() -> dict[str, str]:
    """The keys of the profile that AWS_PROFILE names (else `default`), as options of an S3Store; none: of none.

    Raises:
        ConfigError: AWS_PROFILE names a profile that is not there or has no keys of its own.
    """
    named = os.environ.get("AWS_PROFILE")
    if any(os.environ.get(source) for source in _OTHER_SOURCES):
        return {}
    found = _profile(named or "default")
    if "aws_access_key_id" not in found or "aws_secret_access_key" not in found:
        if named is None:
            return {}
        raise ConfigError(
            f"AWS_PROFILE is {named}, but no keys of that profile are in ~/.aws; name one that has keys, or put keys "
            f"into the environment: eval $(aws configure export-credentials --profile {named} --format env)"
        )
    keys = {"access_key_id": found["aws_access_key_id"], "secret_access_key": found["aws_secret_access_key"]}
    if "aws_session_token" in found:
        keys["session_token"] = found["aws_session_token"]
    return keys


def _profile(name: str) -> dict[str, str]:
    """What the two files say of a profile, the credentials file last."""
    found: dict[str, str] = {}
    for variable, default, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        try:
            path = Path(os.environ.get(variable) or Path.home() / ".aws" / default).expanduser()
        except RuntimeError:  # a user without a home, as containers have
            continue
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(path, encoding="utf-8")
        except (OSError, ValueError, configparser.Error) as error:
            raise ConfigError(f"cannot read {path}: {first_line(error)}; correct the file") from None
        if parser.has_section(section):
            found |= dict(parser.items(section))
    return found
