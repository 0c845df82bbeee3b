from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from herd.llama3.data.text.language import detect_language, primary_subtag
from herd.llama3.data.text.words import split_words


def test_languages_are_told_and_tags_reduced() -> None:
    assert (
        detect_language("Der schnelle braune Fuchs springt über den faulen Hund und läuft in den Wald hinein.") == "de"
    )
    assert (
        detect_language(
            "これは日本語の文章です。\n```\ngit commit --amend --no-edit\n```\n言語を判定するために十分な長さです。"
        )
        == "ja"
    )
    assert detect_language("在 Git 中整合来自不同分支的修改主要有两种方法：`merge` 以及 `rebase`。") == "zh"
    assert (
        detect_language("Если вы хотите начать работать с Git, прочитав всего одну главу, то эта глава для вас.")
        == "ru"
    )
    assert detect_language("# gwhich\n\n> यह आदेश which का उपनाम है। मूल आदेश के लिए दस्तावेज़ देखें") == "hi"
    assert detect_language("The Greek letters α and β name the angles, and γ names the third one of them all.") == "en"
    assert detect_language("") == detect_language("12 + 3") == "und"
    assert [primary_subtag(tag) for tag in ("pt_BR.UTF-8", "zh-TW", "nb", "sr@latin", "")] == [
        "pt",
        "zh",
        "no",
        "sr",
        "und",
    ]


FILES = "\n".join(
    f"https://cache.ruby-lang.org/pub/ruby/3.2/ruby-3.2.4.{ending}\n\nSIZE: 20493\n"
    "SHA1: 9f25ad1c1f7a2b0ea7ec1cdbc9aa19f5d9b\n"
    "SHA256: c72b3c5c30482dca18b0f868c9075f3f47d8168eaf626d4e682ce5b59c858692\n"
    "SHA512: d28e00a8e7a3d1c4e2b1f5b6c9d8e7f6a5b4c3d2e1f0a9b8c7d6e5f4a3b2c1d0e9f8a7b6"
    for ending in ("tar.gz", "tar.xz", "zip")
)


def test_code_and_digests_hide_no_language() -> None:
    """The first was Luxembourgish, the second Polish, the third Catalan."""
    for language, text in [
        ("en", f"Ruby 3.2.4 has been released. Please check the release notes for further details.\n\n{FILES}"),
        ("und", "d28e00a8e7a3d1c4e2b1f5b6c9d8e7f6a5b4c3d2 v1.2.3 0x7fff5694 https://x.org/a_b\n" * 9),
        ("es", "Para crear una rama nueva ejecute `git branch prueba` y luego `git checkout prueba`. Con esto se mueve "
         "HEAD a la rama prueba. Puede ver con git log --oneline --decorate dónde apuntan las ramas. Para volver a "
         "master: git checkout master."),
        ("de", "Installation: `apt install git`. Danach `git config --global user.name NAME` und `git config --global "
         "user.email ADRESSE` setzen. Mit `git init` wird ein leeres Repository angelegt, mit `git add .` kommen alle "
         "Dateien hinein."),
        ("no", "Kommandoen skriv ut innhaldet i ei fil. Bruk -n for å nummerere linjene, og sjå manualen for meir."),
        ("uk", "Команда виводить вміст файла. Параметр -n нумерує рядки, а параметр -s прибирає порожні рядки."),
        ("bg", "Командата извежда съдържанието на файла. Опцията -n номерира редовете, а -s премахва празни редове."),
        ("fa", "این فرمان محتوای پرونده را نشان می‌دهد. گزینهٔ -n سطرها را شماره‌گذاری می‌کند."),
        ("hy", "Հայերենը հնդեվրոպական լեզվաընտանիքի առանձին ճյուղ հանդիսացող լեզու է։"),
    ]:  # fmt: skip
        assert detect_language(text) == language


def test_threads_share_one_model() -> None:
    texts = ["Der schnelle braune Fuchs springt über den Hund.", "Le renard brun saute par-dessus le chien."] * 50
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(detect_language, texts)) == ["de", "fr"] * 50


def test_a_long_text_is_told_by_its_inside() -> None:
    license = "Permission is hereby granted, free of charge, to any person obtaining a copy of this software. " * 8
    german = "Der schnelle braune Fuchs springt über den faulen Hund und läuft weit in den dunklen Wald hinein. " * 90
    assert detect_language(license + german) == "de"
    assert detect_language("これは日本語の文章です。" * 900 + license) == "ja"


def test_words_of_every_script() -> None:
    assert split_words("Don't x_1, Straße!") == ["don", "t", "x_1", "straße"]
    assert split_words("Привет, мир") == ["Привет", "мир"]
    assert split_words("模型abc") == ["模", "型", "abc"]
    assert split_words("हिन्दी") == ["हिन्दी"]
