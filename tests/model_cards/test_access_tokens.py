"""The access token pattern matches the tokens of common services and nothing else."""

import base64
import hashlib
import json
import uuid
from pydoc_data.topics import topics

import pytest

import rules
from crosshead.common.access_tokens import TOKEN, without_tokens
from crosshead.model_cards import published

MIXED = "a1B2c3D4" * 12
JWT = [base64.urlsafe_b64encode(text).decode().rstrip("=") for text in (b'{"alg":"HS256"}', b'{"sub":"1234567890"}')]
TOKENS = {  # in two parts each, so that no scanner takes this file for a leak
    "Hugging Face": "hf" + f"_{MIXED[:34]}",
    "Hugging Face organisation": "api" + f"_org_{MIXED[:34]}",
    "GitHub": "ghp" + f"_{MIXED[:36]}",
    "GitHub fine-grained": "github" + f"_pat_{MIXED[:22]}_{MIXED[:59]}",
    "GitLab": "glpat" + f"-{MIXED[:10]}_{MIXED[:9]}",
    "GitLab routable": "glpat" + f"-{MIXED[:27]}.01.{MIXED[:9]}",
    "Slack bot": "xoxb" + f"-123456789012-1234567890123-{MIXED[:24]}",
    "Slack user": "xoxp" + f"-123456789012-123456789012-123456789012-{MIXED[:32]}",
    "Slack app": "xoxa" + f"-2-{MIXED[:30]}",
    "Slack refresh": "xoxr" + f"-{MIXED[:30]}",
    "Slack workspace": "xoxs" + f"-1234567890-{MIXED[:20]}",
    "Google API key": "AIza" + f"Sy{MIXED[:16]}-_{MIXED[:15]}",
    "Google OAuth": "ya29" + f".a0{MIXED[:40]}-_{MIXED[:40]}",
    "OpenAI": "sk" + f"-{MIXED[:48]}",
    "OpenAI project": "sk" + f"-proj-{MIXED[:30]}_-{MIXED[:30]}",
    "Anthropic": "sk" + f"-ant-api03-{MIXED[:40]}-_AA",
    "Amazon": "AKIA" + "ABCDEFGH12345678",
    "Amazon secret": "AWS_SECRET" + f"_ACCESS_KEY={MIXED[:40]}",
    "npm": "npm" + f"_{MIXED[:36]}",
    "PyPI": "pypi" + f"-AgEIcHlwaS5vcmc{MIXED}-_",
    "PyPI test server": "pypi" + f"-AgENdGVzdC5weXBpLm9yZw{MIXED}",
    "JSON web token": ".".join([*JWT, MIXED[:43]]),
    "private key": "-----BEGIN " + "RSA PRIVATE KEY-----",
}


@pytest.mark.parametrize("service", TOKENS)
def test_pattern_finds_tokens_of_services(service):
    token = TOKENS[service]
    texts = (token, f"key: {token}", f"Bearer {token}.", f"https://x:{token}@host/a", f"?key={token}&b", f"'{token}'")
    for text in (*texts, f"a\n{token}\nb", f"a\t{token}"):
        assert TOKEN.search(text) and TOKEN.search(json.dumps(text)), text
    assert without_tokens({"kept": 1, "key": f"Bearer {token}"}) == ({"kept": 1}, ["key"])


WORDS = [
    *("hf", "hf_", "hf_transfer", "HF_TOKEN", "api_org_", "ghp_", "sk-learn", "sk-", "risk-averse-investors-of-today"),
    *("glpat", "glpat-", "glpat-short", "xoxo", "xoxb-", "xoxo-hugs-and-kisses-1", "xoxp-without-any-number-in-it"),
    *("AIza", "AIzawa", "AIzaSy", "ya29", "ya29.", "ya29.short", "eyJ", "eyJhbGciOiJIUzI1NiJ9", "AKIA", "eyJ.eyJ.eyJ"),
    *("org/llama-sk-instruct-finetuned-2024", "runs/sk-learning-rate-sweep-of-2026", "Ġeyebrow", "Ġsk", "Ġhf", "▁ghp"),
    *("model.layers.10.self_attn.mixers.mixture.routed.weight", "AIza" + MIXED[:34], "AIza" + MIXED[:36]),
    *("npm_config_registry", "npm_" + MIXED[:35], "npm_" + MIXED[:37], "pypi-AgEIcHlwaS5vcmc", "pypi-server"),
]


def test_words_and_names_are_not_matched():
    assert [word for word in WORDS if TOKEN.search(word)] == []
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    assert TOKEN.search(json.dumps({"model": {"vocab": vocabulary, "merges": WORDS}})) is None


@pytest.mark.parametrize("part", ["xoxb-", "-eyJaaaaaaaaaa", "-----BEGIN "])
def test_repeated_beginnings_of_tokens_take_linear_time(part):
    assert TOKEN.search(part * (1_000_000 // len(part))) is None  # hours, if a search read the rest for each beginning


def test_plain_text_is_not_matched():
    assert TOKEN.search("\n".join(map(topics.get, sorted(topics)))) is None


@pytest.mark.parametrize("encode", [base64.b16encode, base64.b32encode, base64.b64encode, bytes.hex])
def test_digests_are_not_matched(encode):
    digests = [hashlib.sha256(str(number).encode()).digest() for number in range(5000)]
    texts = [encode(digest) for digest in (*digests, b"".join(digests))]
    texts = [text if isinstance(text, str) else text.decode() for text in texts]
    assert [text for text in texts if TOKEN.search(text) or TOKEN.search(f"sha256-{text}")] == []


def test_uuids_are_not_matched():
    identifiers = [str(uuid.UUID(int=number * 0x9E3779B97F4A7C15F39CC0605CEDC834 % 2**128)) for number in range(5000)]
    assert TOKEN.search("\n".join(identifiers)) is None


def test_pattern_is_defined_in_one_module():
    sources = [path for folder in rules.FOLDERS for path in (rules.ROOT / folder).rglob("*.py")]
    assert [path.name for path in sources if "github_pat_" in path.read_text(encoding="utf-8")] == ["access_tokens.py"]


@pytest.mark.parametrize("service", ["GitLab", "Slack bot", "Google API key", "Google OAuth", "JSON web token"])
def test_file_with_token_is_not_published(tmp_path, service):
    path = tmp_path / "note.txt"
    path.write_text(f"of\nlines\n{TOKENS[service]}\n")
    with pytest.raises(published.FolderError, match=r"note\.txt.*token") as caught:
        published._check_file(path, path.name, published.Private(TOKEN, (), ()))
    assert TOKENS[service] not in str(caught.value)
