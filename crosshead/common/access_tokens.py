"""Detects access tokens by their form, and removes them from the configurations and other files of a model."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FORMS = (
    r"hf_[A-Za-z0-9]{16,}",  # Hugging Face, of users and of organisations
    r"hf_(?:oauth|jwt)_[\w.-]{16,}",
    r"api_org_[A-Za-z0-9]{16,}",
    r"gh[pousr]_[A-Za-z0-9]{20,}",  # GitHub
    r"github_pat_\w{20,}",
    r"glpat-[A-Za-z0-9_-]{20,}",  # GitLab
    r"xox[baprs]-(?=[A-Za-z-]{0,100}\d)[A-Za-z0-9-]{10,}",  # Slack
    r"AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])",  # Google, API keys and OAuth
    r"ya29\.[A-Za-z0-9_-]{20,}",
    r"sk-(?:(?:proj|svcacct|admin|ant-[a-z]+\d*)-[\w-]{20,}|[A-Za-z0-9]{20,})",  # OpenAI, Anthropic and others
    r"AKIA[0-9A-Z]{16}\b",  # Amazon
    r"(?i:aws_secret_access_key)\W{1,10}(?!/)[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
    r"npm_[A-Za-z0-9]{36}(?![A-Za-z0-9])",
    r"pypi-AgE[A-Za-z0-9_-]{50,}",  # PyPI and its test server
)
"""Regular expressions of the access tokens of common services, for which a search takes time linear in the text."""
BEFORE = (r"(?<![A-Za-z0-9])", r"(?<=%[0-9A-Fa-f]{2})", r"(?<=\\[bfnrt])", r"(?<=\\u[0-9A-Fa-f]{4})")
"""Lookbehinds: before a token stands no letter or digit, except as part of a URL escape or a JSON escape."""
WEB_TOKEN = r"(?<=[A-Za-z0-9_-]{10})\.eyJ[A-Za-z0-9_-]{10,}+\.[A-Za-z0-9_-]{10,}"
"""Matches a JSON web token from the end of its header on."""
TOKEN = re.compile(rf"(?:{'|'.join(BEFORE)})(?:{'|'.join(FORMS)})|{WEB_TOKEN}|-----BEGIN [A-Z ]*PRIVATE KEY-----")
"""Matches an access token of a common service, in plain text or after an escape such as `\\n`, or a private key."""


def without_tokens(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The JSON object without the values that contain a token, and the dotted keys of the removed values."""
    clean, names = {}, []
    for name, value in content.items():
        if isinstance(value, Mapping):
            clean[name], inner = without_tokens(value)
            names += [f"{name}.{key}" for key in inner]
        elif TOKEN.search(json.dumps(value, default=str)):
            names.append(name)
        else:
            clean[name] = value
    return clean, names


def leave_out_tokens(files: Iterable[Path]) -> dict[str, list[str]]:
    """Remove tokens from JSON files; return file name -> removed keys. `ValueError` if a token cannot be removed."""
    removed = {}
    for path in files:
        text = path.read_text(encoding="utf-8")
        if TOKEN.search(text) is None:
            continue
        content = json.loads(text)
        clean, names = without_tokens(content) if isinstance(content, dict) else (content, [])
        cleaned_text = json.dumps(clean, indent=2, ensure_ascii=False) + "\n"
        if TOKEN.search(cleaned_text):
            raise ValueError(f"{path.name} holds an access token: remove it from the file, and revoke it")
        path.write_text(cleaned_text, encoding="utf-8")
        removed[path.name] = names
    return removed
