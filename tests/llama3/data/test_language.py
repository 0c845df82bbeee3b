from __future__ import annotations

from llama3.data.language import detect, primary
from llama3.data.words import words


def test_languages_are_told_and_tags_reduced() -> None:
    assert detect("Der schnelle braune Fuchs springt über den faulen Hund und läuft in den Wald hinein.") == "de"
    assert (
        detect("これは日本語の文章です。\n```\ngit commit --amend --no-edit\n```\n言語を判定するために十分な長さです。")
        == "ja"
    )
    assert detect("在 Git 中整合来自不同分支的修改主要有两种方法：`merge` 以及 `rebase`。") == "zh"
    assert detect("Если вы хотите начать работать с Git, прочитав всего одну главу, то эта глава для вас.") == "ru"
    assert detect("# gwhich\n\n> यह आदेश which का उपनाम है। मूल आदेश के लिए दस्तावेज़ देखें") == "hi"
    assert detect("The Greek letters α and β name the angles, and γ names the third one of them all.") == "en"
    assert detect("") == detect("12 + 3") == "und"
    assert [primary(tag) for tag in ("pt_BR.UTF-8", "zh-TW", "nb", "sr@latin", "")] == ["pt", "zh", "no", "sr", "und"]


def test_a_long_text_is_told_by_its_inside() -> None:
    licence = "Permission is hereby granted, free of charge, to any person obtaining a copy of this software. " * 8
    german = "Der schnelle braune Fuchs springt über den faulen Hund und läuft weit in den dunklen Wald hinein. " * 90
    assert detect(licence + german) == "de"
    assert detect("これは日本語の文章です。" * 900 + licence) == "ja"


def test_words_of_every_script() -> None:
    assert words("Don't x_1, Straße!") == ["don", "t", "x_1", "straße"]
    assert words("Привет, мир") == ["Привет", "мир"]
    assert words("模型abc") == ["模", "型", "abc"]
    assert words("हिन्दी") == ["हिन्दी"]
