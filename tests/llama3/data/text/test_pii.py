from __future__ import annotations

from itertools import product
from string import punctuation

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.text.pii import ADDRESS, ADDRESS_6, EMAIL, redact, redact_text, top_level_domains
from tests.llama3.data.text.pii_samples import negatives, positives

MARKS = [*punctuation, *" \t\n\u00a0", *"„“”«»‹›「」『』‘’‚…—、。（）¿·", ""]
KINDS = {"jane@acme.org": ("email", EMAIL), "jane@web.de": ("email", EMAIL), "93.184.216.34": ("ip", ADDRESS)}
KINDS["2606:4700:4700::1111"] = ("ip", ADDRESS_6)


def test_mail_addresses_become_one_that_nobody_has() -> None:
    for text, becomes in [
        ("write to jane.doe+x@mail.corp.co.uk, or bob@x.org.", "write to email@example.com, or email@example.com."),
        ("mailto:a_b@uni.edu?x <o'neil@irish.ie>", "mailto:email@example.com?x <email@example.com>"),
        ("Joe.Blow@ACME.COM (mailto://joe@acme.com)", "email@example.com (mailto://email@example.com)"),
        (f"{'x' * 64}@a.org", "email@example.com"),
        ("张三@qq.com、jane@uni-köln.de", "email@example.com、email@example.com"),
        ("请发邮件至zhang@qq.com联系", "请发邮件至email@example.com联系"),
        ("문의jane@naver.com으로", "문의email@example.com으로"),
        ("jörg.müller@web.de; почта@пример.рф!", "email@example.com; email@example.com!"),
        (
            "see http://a.org/?to=jane@x.org [jane@x.org](mailto:j@ab.org)",
            "see http://a.org/?to=email@example.com [email@example.com](mailto:email@example.com)",
        ),
        ("jane@wp.pl, j@web.de and jane@t.co", "email@example.com, email@example.com and email@example.com"),
    ]:
        assert redact_text(text, "email") == (becomes, becomes.count("email@"))


def test_what_is_nobodys_mail_stays() -> None:
    for text in [
        "git@github.com:a/b.git",
        "x@self.weight @decorator a@b pkg@1.2.3",
        "you@example.org",
        "a@b.com@c.org",
        "@",
        "http://user:pass@complex.url.com/",
        "ftp://jane@ftp.uni.de/x",
        "W@x.to(device)",
        "A@B.at[0]",
        "a@b.py",
        "y = self.W@self.x.to(device)",
        "hidden = hidden@proj.data + bias@w.dot",
        "run@main.py",
        "redis://:pw@cache.host.net:6379",
    ]:
        assert redact_text(text, "email") == (text, 0)


@pytest.mark.parametrize("address", KINDS)
def test_an_address_between_any_marks_is_replaced_and_nothing_else(address: str) -> None:
    kind, becomes = KINDS[address]
    for left, right in product(MARKS, MARKS):
        if address.endswith(".de") and right in ("(", "["):
            continue  # a call or an index
        for before, after in (("", ""), ("at\n", "\nnow"), (f"{left} ", f" {right}")):
            text = f"{before}{left}{address}{right}{after}"
            assert redact_text(text, kind) == (f"{before}{left}{becomes}{right}{after}", 1), text


@pytest.mark.parametrize("address", KINDS)
def test_all_places_of_an_address_agree(address: str) -> None:
    kind, _ = KINDS[address]
    for left, right in [*product(MARKS, MARKS), ("version ", "-rc1"), ("http://", "/"), ("W@", "@x.org")]:
        if address[0] in "29" or "@" not in (left + right)[1:]:
            found, count = redact_text(f"{left}{address.upper()}{right} is {address}", kind)
            assert (address.upper() in found, count) == (False, 2), f"{left}{address}{right}"
    assert redact_text("http://jane@acme.org, v 93.184.216.34", "email")[1] == 0
    assert redact_text("http://jane@acme.org, v 93.184.216.34", "ip")[1] == 0


def test_marks_belong_to_an_address_after_a_letter_or_digit() -> None:
    for text, becomes in [
        ("'o'brien@x.org'", f"'{EMAIL}'"),
        ('("o\'brien@x.org")', f'("{EMAIL}")'),
        ("_.-+%'a.b-c_d+e%f@x.org'", f"_.-+%'{EMAIL}'"),
        ("'name'+'jane@x.org'+'.'", f"'name'+'{EMAIL}'+'.'"),
        ("b'jane@x.org' br'jane@x.org is' N'jane@x.org, '", f"b'{EMAIL}' br'{EMAIL} is' N'{EMAIL}, '"),
        ("x'jane@x.org'", f"x'{EMAIL}'"),
        ("write to...jane@x.org...", f"write to...{EMAIL}..."),
        ("a_@x.org b-@x.org", f"{EMAIL} {EMAIL}"),
        ("jane@acme.org_jane@acme.org-bob@corp.com", f"{EMAIL}_{EMAIL}-{EMAIL}"),
        ("jane@web.de.Please write to jane@x.org.please", f"{EMAIL}.Please write to {EMAIL}.please"),
        (f"{'x' * 70}-jane@x.org", f"{'x' * 70}-{EMAIL}"),
        (
            r'"to\njane@x.org", \u003cjane@x.org\u003e, %3Cjane@x.org%3E',
            rf'"to\n{EMAIL}", \u003c{EMAIL}\u003e, %3C{EMAIL}%3E',
        ),
        (r'my $mail = "jane\@x.org";', r'my $mail = "email\@example.com";'),
    ]:
        assert redact_text(text, "email") == (becomes, becomes.count("example"))


def test_every_top_level_domain_is_known() -> None:
    assert len(top_level_domains()) > 1000
    for tld in top_level_domains() - {"py", "zip", "mov", "data", "dot", "map", "prod"}:
        for host in (f"acme.{tld}", f"mail.acme.{tld}", *([] if tld.isascii() else [f"{tld}.{tld}", f"xn--a.{tld}"])):
            assert redact_text(f"«jane@{host}»", "email") == (f"«{EMAIL}»", 1), host
    for host in ("ACME.BERLIN", "Acme.Com", "acme.xn--p1ai", "पत्र.भारत", "mail.comи"):
        assert redact_text(f"jane@{host}", "email")[1] == 1, host
    for host in ("acme.weight", "acme.Berlin", "acme.xn--none", "acme.рфы", "acme.comet", "acme.de-x", "acme.de_x"):
        assert redact_text(f"jane@{host}", "email")[1] == 0, host


def test_samples_lose_their_addresses_and_nothing_else() -> None:
    count = 0
    for kind, address, around in positives():
        becomes = EMAIL if kind == "email" else ADDRESS_6 if ":" in address else ADDRESS
        places = around.count("{}")
        found = redact_text(around.format(*[address] * places), kind)
        assert found == (around.format(*[becomes] * places), places), (address, around)
        count += 1
    assert count > 1000


def test_samples_without_addresses_stay() -> None:
    texts = list(negatives())
    assert len(texts) > 300
    for kind, text in texts:
        assert redact_text(text, kind) == (text, 0)


def test_ranges_ports_and_suffixes_of_addresses() -> None:
    for text, becomes in [
        ("93.184.216.34-93.184.216.99", f"{ADDRESS}-{ADDRESS}"),
        ("93.184.216.34-10.0.0.9", f"{ADDRESS}-10.0.0.9"),
        ("ip:2606:4700:4700::1111:", f"ip:{ADDRESS_6}:"),
        ("2400:CB00:2048:1:0:0:6810:2A4F:8080", f"{ADDRESS_6}:8080"),
        ("93.184.216.34.The 2606:4700:4700::1111.The", f"{ADDRESS}.The {ADDRESS_6}.The"),
        ("2606:4700:4700::1111-2606:4700:4700::2222", f"{ADDRESS_6}-{ADDRESS_6}"),
        ("fd00:2606:4700:4700::1111 2606:4700:4700::1111.1", "fd00:2606:4700:4700::1111 2606:4700:4700::1111.1"),
    ]:
        assert redact_text(text, "ip")[0] == becomes


def test_public_addresses_become_one_for_documentation() -> None:
    assert redact_text("ping 93.184.216.34.", "ip") == ("ping 192.0.2.1.", 1)
    assert redact_text("http://93.184.216.34:80/24 (8.8.18.8)", "ip") == ("http://192.0.2.1:80/24 (192.0.2.1)", 2)


def test_public_ipv6_addresses_become_one_for_documentation() -> None:
    text = "from 2a00:1450:4001:81b::200e to [2606:4700:4700::1111]:443, 2400:CB00:2048:1:0:0:6810:2A4F."
    becomes = "from 2001:db8::1 to [2001:db8::1]:443, 2001:db8::1."
    assert redact_text(text, "ip") == (becomes, 3)
    assert redact(pa.array(["a 2606:4700:4700::1111 b"]), ["ip"])[0].to_pylist() == ["a 2001:db8::1 b"]


def test_versions_and_addresses_of_nobody_stay() -> None:
    for text in [
        "kernel 4.15.0.112", "see 12.4.2.1", "from 10.x to 11.0.1.22", "Upgraded to 93.184.21.3", "2.4 - 11.0.1.22",
        "in the year 2006::", "2262::1",
        "2001:db8::7", "fe80::1ff:fe23:4567:890a", "2024:10:11", "std::2000::x", "2024:1a2b:ff", "3fff:1::2",
        "1.2.3.4567", "v93.1.2.3", "version 93.184.21.3", "==93.184.216.34", "section 12.3.4.50", "1.3.6.1.4.1.99",
        "93.184.216.34-rc", "256.1.1.1", "1.2.3.4", "192.168.1.1 127.0.0.1 10.0.0.1 224.0.0.1 172.20.3.4 203.0.113.77",
    ]:  # fmt: skip
        assert redact_text(text, "ip") == (text, 0)


def test_a_column_is_redacted_and_counted() -> None:
    texts = pa.chunked_array([["a@b.org 93.184.216.34 c@d.org", "nothing"], [None, "e@f.org"]], pa.large_string())
    found, counts, _ = redact(texts, ["email", "ip"])
    assert found.to_pylist() == ["email@example.com 192.0.2.1 email@example.com", "nothing", None, "email@example.com"]
    assert counts.tolist() == [3, 0, 0, 1]
    assert found.type == texts.type
    assert redact(texts, ["ip"])[1].tolist() == [1, 0, 0, 0]
    assert redact(texts, [])[0] is texts


def test_what_was_replaced_has_its_place_in_the_text_before() -> None:
    text = "語 93.184.216.34 from a@b.org to 93.184.216.35, a.long.name@some.host.de; at 2606:4700:4700::1111 c@d.org"
    for kinds in (["email", "ip"], ["ip", "email"]):
        (places,) = redact(pa.array(["nothing", text]), kinds).places.values()
        found = [(text[start:stop], kind) for start, stop, kind in sorted(places)]
        assert found == [
            ("93.184.216.34", "ip"), ("a@b.org", "email"), ("93.184.216.35", "ip"),
            ("a.long.name@some.host.de", "email"), ("2606:4700:4700::1111", "ip"), ("c@d.org", "email"),
        ]  # fmt: skip


MIXED = st.lists(st.sampled_from([*KINDS, "a@b.de", "http://", "v ", "x", *"@.-_'%(:1\\ "]), max_size=12).map("".join)


@given(st.text("ab1289.@-_'(\\ \n", max_size=60) | MIXED, st.sampled_from(["email", "ip"]))
def test_redacting_twice_changes_nothing(text: str, kind: str) -> None:
    once, _ = redact_text(text, kind)
    assert redact_text(once, kind) == (once, 0)


@given(
    st.text("ab .,@\n", max_size=60), st.from_regex(r"[a-z]{1,8}(\.[a-z]{1,8})?@[a-z]{1,8}\.(org|de)", fullmatch=True)
)
def test_an_address_between_blanks_never_stays(text: str, address: str) -> None:
    if not address.endswith("@example.org") and not address.startswith("git@"):
        found, count = redact_text(f"{text} {address} {text}", "email")
        assert f" {address} " not in found
        assert count >= 1
