"""The text of a web configuration: what it means, and that each mistake is one line with its key."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumap.agent.web.config import IF_GIVEN, NONE, REQUIRED, TlsConfig, WebConfig, WebConfigError, parse
from gpumap.agent.web.guard import Guard
from gpumap.model.errors import UsageError
from tests.certificates import make_certificate
from tests.command import one_line, run_command
from tests.examples import examples
from tests.fences import read_blocks

HASH = "$2y$04$abcdefghijklmnopqrstuu" + "A" * 31
PAIR = "cert_file: a.crt\n  key_file: a.key"
FILES = TlsConfig(cert_file="a.crt", key_file="a.key")
CLIENT = f"client_ca_file: ca.crt\n  client_auth_type: {REQUIRED}"


def tls(text: str) -> str:
    return f"tls_server_config:\n  {PAIR}\n  {text}\n"


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("", WebConfig()),
        ("# nothing\n", WebConfig()),
        ("tls_server_config:\nbasic_auth_users: ~\n", WebConfig()),
        ("tls_server_config:\nbasic_auth_users: {}\n", WebConfig()),
        (tls(""), WebConfig(FILES)),
        (tls("client_auth_type: NoClientCert"), WebConfig(FILES)),
        (tls("client_ca_file:\n  min_version: ~"), WebConfig(FILES)),
        (tls(CLIENT), WebConfig(replace(FILES, client_ca_file="ca.crt", client_auth_type=REQUIRED))),
        (
            tls("min_version: TLS13\n  max_version: TLS13"),
            WebConfig(replace(FILES, min_version="TLS13", max_version="TLS13")),
        ),
        (f"basic_auth_users:\n  alice: {HASH}\n  7: {HASH}\n", WebConfig(users={"alice": HASH, "7": HASH})),
    ],
)
def test_what_is_meant(text: str, config: WebConfig) -> None:
    """Keys, defaults and forms of values are those of the exporter-toolkit; an empty file asks for nothing."""
    parsed = parse(text.encode())
    assert parsed == config
    assert HASH not in repr(parsed)


@pytest.mark.parametrize(
    ("before", "after", "left_out"),
    [
        (f"basic_auth_users: {{a: {HASH}}}", "tls_server_config: {}", "basic_auth_users"),
        (f"basic_auth_users: {{a: {HASH}}}", "basic_auth_users: {}", None),
        ("basic_auth_users: {}", "", None),
        (tls(CLIENT), "", "tls_server_config"),
        (tls(CLIENT), "tls_server_config: {}", None),
        (tls(CLIENT), tls(""), "client_auth_type"),
        (tls(CLIENT), tls("client_auth_type:"), "client_auth_type"),
        (tls(CLIENT), tls("client_auth_type: NoClientCert"), None),
        ("", tls(CLIENT), None),
    ],
)
def test_what_is_left_out(before: str, after: str, left_out: str | None) -> None:
    """Nothing that was required is removed by a file that does not mention it: it may be cut off."""
    assert missing_key(after, before) == left_out


def missing_key(after: str, before: str) -> str | None:
    """What a running gpumap with the configuration `before` misses in another one."""
    config = parse(after.encode())
    try:
        config.check_complete(parse(before.encode()))
    except WebConfigError as error:
        return str(error).partition(": is missing, perhaps cut off; to remove it, write")[0]
    return None


def test_no_cut_removes_a_requirement() -> None:
    """Wherever a file is cut off, it is invalid, or requires as much, or leaves something out."""
    text = tls(CLIENT) + f"basic_auth_users:\n  alice: {HASH}\n"
    active = parse(text.encode())
    for length in range(len(text)):
        try:
            cut = parse(text[:length].encode())
            cut.check_complete(active)
        except WebConfigError:
            continue
        assert cut.words() == active.words(), text[:length]


def test_the_sample_of_the_documentation() -> None:
    """docs/how-to/secure-the-port.md has one that is taken, with all keys that there are."""
    page = Path(__file__).resolve().parent.parent / "docs/how-to/secure-the-port.md"
    sample = next(block.body for block in read_blocks(page.read_text(), "yaml") if not block.words)
    config = parse(sample.encode())
    assert config.tls is not None
    assert len(config.users) == 1
    assert all(getattr(config.tls, name) for name in config.tls.__struct_fields__)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "the file: must have keys and values"),
        ("a: [", "line 1: is not YAML"),
        ("\x01", "is not YAML"),
        ("x: 1", "the file: Object contains unknown field `x`"),
        ("basic_auth_users: {}\nbasic_auth_users: {}", "line 2: basic_auth_users: is set twice"),
        ("tls_server_config:\n  min_version: TLS13", "tls_server_config.cert_file: is missing; TLS requires"),
        ("tls_server_config: {cert_file: a}", "tls_server_config.key_file: is missing; TLS requires"),
        ('tls_server_config: {cert_file: "a\\0b"}', "tls_server_config.cert_file: must be a path"),
        (tls(f"client_auth_type: {REQUIRED}"), "tls_server_config.client_ca_file: is missing"),
        (tls(f"client_auth_type: {IF_GIVEN}"), "tls_server_config.client_ca_file: is missing"),
        (tls("client_ca_file: x"), "tls_server_config.client_auth_type: is missing: client_ca_file"),
        *(
            (tls(f"client_auth_type: {policy}"), f"tls_server_config.client_auth_type: must be {NONE}, or {IF_GIVEN}")
            for policy in ("RequireAnyClientCert", "RequestClientCert", "RequireClientCert", "hunter2")
        ),
        (tls("client_auth_type: !!null RequireAndVerifyClientCert"), "tls_server_config.client_ca_file: is"),
        (
            "tls_server_config:\n  key_file: |\n    -----BEGIN PRIVATE KEY-----\n    hunter2\n  cert_file: a",
            "tls_server_config.key_file: must be a path",
        ),
        ('tls_server_config: {cert_file: "a\\nhunter2"}', "tls_server_config.cert_file: must be a path"),
        ('basic_auth_users: {a: "\\Uffffffff"}', "is not YAML"),
        ('basic_auth_users: {a: "\\ud800"}', "basic_auth_users.a: must be a bcrypt hash"),
        ("basic_auth_users: {a: *hunter2}", "line 1: is not YAML"),
        ("basic_auth_users: {a: [hunter2]}", "basic_auth_users[...]: Expected `str`, got `array`"),
        (f"basic_auth_users: {{'': {HASH}}}", "basic_auth_users: a user name is empty"),
        (tls("min_version: TLS10"), "tls_server_config.min_version: must be TLS12 or TLS13"),
        (tls("min_version: '1.2'"), "tls_server_config.min_version: must be TLS12 or TLS13"),
        (tls("min_version: TLS13\n  max_version: TLS12"), "tls_server_config.min_version: is above"),
        *(
            (tls(f"{key}: x"), f"tls_server_config: Object contains unknown field `{key}`")
            for key in ("cert", "key", "client_ca", "client_allowed_sans", "cipher_suites", "curve_preferences")
        ),
        ("http_server_config: {}", "the file: Object contains unknown field `http_server_config`"),
        ("rate_limit: {}", "the file: Object contains unknown field `rate_limit`"),
        ("basic_auth_users:\n  bob: hunter2", "basic_auth_users.bob: must be a bcrypt hash"),
        ("basic_auth_users:\n  bob:", "basic_auth_users.bob: must be a bcrypt hash"),
        (
            f"basic_auth_users: {{bob: {HASH.replace('$04$', '$31$')}}}",
            "basic_auth_users.bob: has a cost of 31",
        ),
        (f'basic_auth_users: {{"a:b": {HASH}}}', "basic_auth_users: a user name is empty, or has a colon"),
    ],
)
def test_mistakes(text: str, expected: str) -> None:
    """One line that says where and what, and repeats no value that may be a secret."""
    with pytest.raises(WebConfigError) as raised:
        parse(text.encode())
    message = str(raised.value)
    assert message.startswith(expected)
    assert message.isprintable()
    assert "hunter2" not in message
    assert HASH not in message


PIECES = (
    *("tls_server_config:\n", "basic_auth_users:\n", "  cert_file: ", "  key_file: ", "  client_auth_type: ", "  a: "),
    *(
        "server.crt\n",
        f"{HASH}\n",
        f"{REQUIRED}\n",
        "~\n",
        "!!null x\n",
        "{a: b}\n",
        "&a [*a]\n",
        "*a\n",
        "-----BEGIN\n",
    ),
    *('"\\ud800"\n', '"\\Uffffffff"\n', '"\\0"\n', "[[", "}", "? ", "<<: "),
)
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=12).map(lambda words: "".join(words))


@given(st.one_of(st.binary(max_size=200), TEXTS.map(lambda text: text.encode(errors="replace"))))
@settings(max_examples=examples(300))
def test_whatever_the_file_holds(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """It is taken, or refused with one printable line as a mistake of the user's."""
    path = tmp_path_factory.getbasetemp() / "fuzz.yml"
    path.write_bytes(data)
    message = ""
    try:
        Guard(path).close()
    except UsageError as error:
        message = str(error)
    assert message.isprintable()
    assert message.startswith(f"--web-config {path}: ") or not message


def refused(folder: Path, text: str) -> str:
    """What is wrong with a configuration and its files, after the file's name."""
    path = folder / "web.yml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        Guard(path)
    return str(raised.value).removeprefix(f"--web-config {path}: ")


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    """Each is named as it was written, with its key; the paths begin where the configuration is."""
    for name in ("a", "b"):
        make_certificate(tmp_path, name)
    (tmp_path / "junk").write_text("junk")
    key = (tmp_path / "a.key").read_text()
    (tmp_path / "cut.key").write_text(key[: len(key) // 2])
    locked = ("-in", tmp_path / "a.key", "-aes256", "-passout", "pass:x", "-out", tmp_path / "locked.key")
    subprocess.run(("openssl", "pkey", *locked), check=True, capture_output=True)
    place = "tls_server_config."
    for text, expected in (
        ("cert_file: no, key_file: a.key", f"{place}cert_file no: No such file or directory"),
        ("cert_file: a.crt, key_file: no", f"{place}key_file no: No such file or directory"),
        ("cert_file: ., key_file: a.key", f"{place}cert_file .: Is a directory"),
        ("cert_file: /dev/zero, key_file: a.key", f"{place}cert_file /dev/zero: is not a file"),
        ("cert_file: junk, key_file: a.key", f"{place}cert_file junk: contains no certificate in PEM format"),
        ("cert_file: a.crt, key_file: junk", f"{place}key_file junk: contains no private key in PEM format"),
        ("cert_file: a.crt, key_file: b.key", f"{place}key_file b.key: is not the key of {place}cert_file a.crt"),
        ("cert_file: a.crt, key_file: cut.key", f"{place}cert_file a.crt and {place}key_file cut.key: are not usable"),
        ("cert_file: a.crt, key_file: locked.key", f"{place}key_file locked.key: is encrypted"),
        (
            f"cert_file: a.crt, key_file: a.key, client_ca_file: junk, client_auth_type: {REQUIRED}",
            f"{place}client_ca_file junk: contains no certificate in PEM format",
        ),
    ):
        assert refused(tmp_path, f"tls_server_config: {{{text}}}").startswith(expected)


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_mistake_ends_the_command(tmp_path: Path, command: str) -> None:
    """With exit code 2 and one line, given as a flag or as a variable; a file that is missing is a mistake too."""
    path = tmp_path / "web.yml"
    flags = (command, "--listen", "127.0.0.1:0")
    missing = one_line(run_command(*flags, "--web-config", str(path)), 2)
    assert missing == f"--web-config {path}: No such file or directory"
    path.write_text("basic_auth_users:\n  bob: hunter2\n")
    message = one_line(run_command(*flags, GPUMAP_WEB_CONFIG=str(path)), 2)
    assert message.startswith(f"--web-config {path}: basic_auth_users.bob: must be a bcrypt hash")
    assert one_line(run_command(*flags, "--web-config", str(tmp_path)), 2).endswith("is a directory")
