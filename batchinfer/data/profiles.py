"""Keys of an AWS profile, for obstore, which reads the environment and the machine's role but no profile."""

import configparser
import os
from pathlib import Path

from batchinfer.records import ConfigError
from batchinfer.sanitize import first_line

# sources that obstore reads itself; as in AWS's libraries, keys in the environment take precedence over a profile
_OTHER_SOURCES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def profile_keys() -> dict[str, str]:
    """Return the keys of the profile AWS_PROFILE (else `default`) as options of an S3Store; {} if there are none.

    Return {} as well if the environment has keys or another source of credentials.

    Raises:
        ConfigError: AWS_PROFILE names a profile that does not exist or has no keys of its own.
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
    """Return the settings of a profile from the config file and, with precedence, the credentials file."""
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
