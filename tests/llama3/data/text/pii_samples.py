"""Texts with and without personal data, in prose and in the languages in which people and programs write addresses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

MAILS = (
    "jane@acme.org", "jane.doe+tag@mail.corp.co.uk", "a_b-c@uni-köln.de", "bob123@x.technology", "j@acme.berlin",
    "JANE@ACME.COM", "почта@пример.рф", "mark@shop.aero", "nina@rt.pl", "r2@x.org",
)  # fmt: skip
NUMBERS = ("93.184.216.34", "8.8.18.8", "217.0.0.1")
NUMBERS_6 = ("2606:4700:4700::1111", "2a00:1450:4001:81b::200e", "2400:CB00:2048:1:0:0:6810:2A4F")
AROUND_MAILS = {
    "prose": [
        "Write to {} today.", "Contact: {}, or call.", "({})", "„{}“ schrieb er", "« {} »", "«{}»", "「{}」", "‘{}’",
        "“{}”", "‹{}›", "E-mail:{};", "mail {}…", "dash—{}—dash", "请联系{}。", "to...{}...", "Is it {}? {}!",
        "To:\n{}\n",
    ],
    "markdown": [
        "_{}_", "*{}*", "**{}**", "`{}`", "<{}>", "[{}](mailto:{})", "- {}", "-{}", "| Bob | {} |", "> {}", "~~{}~~",
        "1. {}", "[1]:{}", "__{}__", "#{}",
    ],
    "sql": [
        "INSERT INTO users VALUES (1,'Bob','{}',NULL);", "(2,'{}'),(3,'x')", "DETAIL: Key (email)=({}) already exists.",
        "WHERE email = N'{}'", "E'{}\\n'", "1\t{}\t2020-01-01", '"{}"', "LIKE '%{}%'", "|{}|",
    ],
    "python": [
        "author_email='{}',", "b'{}'", 'f"{}"', "x = ['{}']", "print('to\\n{}')", "# {}", "__email__ = '{}'",
        "('Bob', '{}')", "rb'{}'", "'\\t{}'", "mail={}", '"""{}"""', "'''{}'''",
    ],
    "ruby": [
        "User.new(email: '{}')", "%w[{}]", "%q({})", '"#{{name}} <{}>"', ":email=>'{}'", "s.email = %q{{{}}}",
        "expect('{}').to eq x", "=begin {} =end",
    ],
    "php": ["$to = '{}';", "define('MAIL','{}');", '"To: {}\\r\\n"', "['mail'=>'{}']", 'mail("{}",$s)', "<?='{}'?>"],
    "js": [
        "const a = `{}`;", "{{email:'{}'}}", 'href="mailto:{}?subject=x"', "// {}", "/* @author {} */",
        "'{}'.split('@')", "f('{}')", "<b>{}</b>", "?to={}&x=1", "?to=%3C{}%3E", "&lt;{}&gt;", "/^{}$/",
    ],
    "java": [" * @author {}", 'new InternetAddress("{}")', " * @author Bob <{}>", 'println("<" + "{}" + ">");'],
    "go": ['const a = "{}"', 'mail.Address{{"Bob", "{}"}}', "`{}`", "\\u003c{}\\u003e", "\\x3c{}\\x3e"],
    "c": ['#define MAIL "{}"', "/* {} */", "/*{}*/", "(C) 2001 Bob <{}>", 'printf("%s\\n{}\\n", x);', "'{}'"],
    "shell": [
        "git config user.email {}", "git commit --author='Bob <{}>'", "export MAIL={}", "mail -s x {} < f",
        'echo "{}"|sendmail -t', "--email={}", "curl -u {}:secret -o x", "$({})", "MAIL='{}'", "a;{};b", "x&{}&",
    ],
    "yaml": ["email: {}", "email: '{}'", "emails: [{}, x]", 'mail: "{}" # x', "{{a: {}}}", "mail: !str {}"],
    "json": ['{{"email":"{}"}}', '["{}","x"]', '"from": "Bob <{}>"', '"t": "a\\n{}\\nb"', '"\\u003c{}\\u003e"'],
    "lua": ["mail = '{}'", "mail = [[{}]]", "{{'{}'}}", "-- {}", "--{}"],
    "perl": ["my $m = '{}';", "qw({})", "q{{{}}}", "q|{}|", "m/{}/", "=> '{}'"],
}  # fmt: skip
AROUND_NUMBERS = [
    "host {} is up", "'{}'", '"{}"', "_{}_", "host {}-", "-{}", "ip_{}", "[{}]", "({})", "{}/24", "root@{}", "IP={}",
    '"ip":"{}"', "{},x", "`{}`", "„{}“", "«{}»", "「{}」", "server {};", "({},'x')", "{} - - [10/Oct/2000:13:55:36]",
    "地址{}。", "*{}*", "|{}|", "~{}~", "+{}+", "%{}%", "&{}&", "<{}>", "{{{}}}", "#{}", "${}$", "!{}!", "http://{}/",
    "\\{}\\", "^{}^", "{}\n{}", "From {}.", "to {}?", ".{}.", "...{}...", "ip-range: {}-{}", "log_{}_x",
]  # fmt: skip


def positives() -> Iterator[tuple[str, str, str]]:
    """Yield (kind, address, text around it with {} for the address)."""
    for group in AROUND_MAILS.values():
        yield from (("email", mail, around) for around, mail in product(group, MAILS))
    for around, number in product(AROUND_NUMBERS, NUMBERS + NUMBERS_6):
        yield "ip", number, around
    yield from (
        ("ip", number, around) for number in NUMBERS for around in ("http://{}:80/x", "ssh root@{}:22", "{}:443")
    )
    yield from (("ip", number, "http://[{}]:443/x") for number in NUMBERS_6)


def negatives() -> Iterator[tuple[str, str]]:
    """Yield (kind, text without personal data)."""
    for left, right in product(("x", "W", "h", "self.W", "A1"), ("w", "B", "self", "self.proj", "x2")):
        for name in (
            "T",
            "weight",
            "data",
            "to(device)",
            "mm(b)",
            "at[0]",
            "map(f)",
            "weight.data",
            "to_dense()",
            "is_cuda",
        ):
            yield "email", f"y = {left}@{right}.{name} + 1"
    yield from (("email", text) for text in NO_MAILS)
    yield from (("ip", text) for text in NO_NUMBERS)


NO_MAILS = [
    "@app.route('/x')", "\\n@mlflow.trace\\ndef f", "x\n@pytest.fixture\ndef y", "@types/node@1.2.3", "react@18.2.0",
    "npm i @angular/core@next", "pkg@npm:other@1.0.0", "yarn add vue@latest", "uses: actions/checkout@v4.1",
    "docker/build-push-action@v5.1.0", "image@sha256:abc.de", "go get golang.org/x/tools@v0.1.0", "python@3.12",
    "lib@2.x", "foo@1.bar", "@media screen", "}@media(max-width:1px)", "@import url(x.css)", "a{b:c}@font-face{}",
    "@Override", '@SuppressWarnings("x")', "@org.junit.Test", "this@Main.name", "this@MainActivity.app",
    "return@forEach",
    "super@Outer.run()", "icon@2x.png", "icon@2x.md", "run@main.py", "logo@3x.zip", "photo@home.jpeg", "a@b.zip",
    "getty@tty1.service", "\\@ifnextchar", "\\f@size", '"#{@user.id}"', "@{$x->y}", "$x = @foo.bar", "foo@plt",
    "memcpy@GLIBC_2.2.5", "git@github.com:a/b.git", "http://user:pw@host.com/x", "ftp://jane@ftp.uni.de", "%s@%s",
    "'%s@acme.org' % x", "'{}@acme.org'", "${user}@acme.org", "#{name}@acme.org", "you@example.com", '@"text"',
    "all@(x:xs)", "p @ Foo.id", "n@1..=5", "@spec foo.bar", "@model.Name", "root@localhost", "a@b.com@c.org", "@",
    "jane@corp", "x@y", "@.com", "jane@.com", ".@x.com", "a@b@c", "select a.*@link", "'root'@'localhost'",
    "y = self.W@self.x.to(device)", "Foo@1b2c3d.x", "jane(at)acme.org", "postgres://me:pw@db.host.net:5432/x",
]  # fmt: skip
NO_NUMBERS = [
    "v2.0.0.1", "kernel 4.15.0.112", "see 12.4.2.1", "section 12.3.4.50", "§ 12.3.4.50", "1.3.6.1.4.1.99", "1.2.3.4",
    "libx-93.184.21.3", "libx-93.184.21.3-rc1", "93.184.21.3+build", "tool_93.184.21.3_amd64.deb", "93.184.21.3.tar.gz",
    'version = "93.184.21.3"', "<version>93.184.21.3</version>", 'AssemblyVersion("93.184.21.3")',
    "VERSION='93.18.21.3'",
    '"version": "93.184.21.3"', "pip install x==93.184.21.3", "x>=93.184.21.3", "12:30:45", "2024:10:11", "2001:db8::1",
    "2024-10-11 12:30:45.123", "2024:1a2b:ff", "de:ad:be:ef:00:01", "2000:11:22:33:44:55", "std::2000::x", "::2000:1:2",
    "256.1.1.1", "1.2.3.4567", "10.1.2.3", "127.0.0.1", "192.168.0.1", "1,234.567.890.12", "0.93.184.216.34", "1.2.3",
    "93.184.216", "upgraded to 93.184.21.3", "2.4 - 11.0.1.22", "fd00:2606:4700:4700::1111", "in the year 2006::",
]  # fmt: skip
