import pytest


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a fast encoder on few strings: on all 30,000 each new tokenizer costs a second."""
    monkeypatch.setattr("herd.llama3.tokens.encoder.adversarial_strings", lambda: iter(["", "ſ", "1234 a's"]))
