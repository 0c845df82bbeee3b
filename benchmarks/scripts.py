"""Rows about the script of a text: what each path of a document through the readers costs, in the kind of text where it
is slowest.

A path that is fast in English may call Python for every document in Hindi, or for one emoji a document. The texts are
random orders of the words below, so that only letters, marks and their bytes matter.
"""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

from benchmarks.rows import Row, measured
from benchmarks.session import Session

DOCUMENT, DOCUMENTS = 4_000, 100
"""Bytes of a document, and documents of a kind."""
SENTENCES = {
    "en": "The library opens at nine in the morning, and children read their new books by the window.",
    "fr": "La bibliothèque ouvre à neuf heures, et les élèves âgés de huit ans y lisent près de la fenêtre.",
    "de": "Die Bücherei öffnet um neun Uhr, und größere Kinder lesen für sich am Fenster über dem Fluß.",
    "pt": "A BIBLIOTECA DE SÃO JOÃO NÃO ABRE ÀS TERÇAS, E A LIÇÃO É À TARDE, COM PÃES E MAÇÃS ÂMBAR.",
    "pl": "Biblioteka otwiera się o dziewiątej, więc dzieci czytają książki, żółte i błękitne, przy oknie.",
    "tr": "Kütüphane sabah dokuzda açılır, çocuklar yeni kitaplarını pencerenin önünde sessizce okurlar.",
    "vi": "Thư viện mở cửa lúc chín giờ sáng, và trẻ em đọc những quyển sách mới bên cửa sổ nhìn ra sông.",
    "ru": "Библиотека открывается в девять утра, и дети читают свои новые книги у большого окна.",
    "el": "Η βιβλιοθήκη ανοίγει στις εννέα το πρωί, και τα παιδιά διαβάζουν τα νέα τους βιβλία στο παράθυρο.",
    "he": "הספרייה נפתחת בתשע בבוקר, והילדים קוראים את הספרים החדשים שלהם ליד החלון.",
    "he-points": "הַסִּפְרִיָּה נִפְתַּחַת בְּתֵשַׁע בַּבֹּקֶר, וְהַיְלָדִים קוֹרְאִים סְפָרִים חֲדָשִׁים.",
    "ar": "تفتح المكتبة أبوابها في التاسعة صباحا، ويقرأ الأطفال كتبهم الجديدة قرب النافذة.",
    "fa": "کتابخانه ساعت نه صبح باز می‌شود، و کودکان کتاب‌های تازه‌شان را کنار پنجره می‌خوانند.",
    "hi": "पुस्तकालय सुबह नौ बजे खुलता है, और बच्चे खिड़की के पास अपनी नई किताबें पढ़ते हैं।",
    "bn": "গ্রন্থাগার সকাল নয়টায় খোলে, আর শিশুরা জানালার পাশে বসে তাদের নতুন বইগুলো পড়ে।",
    "pa": "ਲਾਇਬ੍ਰੇਰੀ ਸਵੇਰੇ ਨੌਂ ਵਜੇ ਖੁੱਲ੍ਹਦੀ ਹੈ, ਅਤੇ ਬੱਚੇ ਖਿੜਕੀ ਕੋਲ ਆਪਣੀਆਂ ਨਵੀਆਂ ਕਿਤਾਬਾਂ ਪੜ੍ਹਦੇ ਹਨ।",
    "gu": "પુસ્તકાલય સવારે નવ વાગ્યે ખૂલે છે, અને બાળકો બારી પાસે પોતાનાં નવાં પુસ્તકો વાંચે છે.",
    "ta": "நூலகம் காலை ஒன்பது மணிக்குத் திறக்கிறது, குழந்தைகள் ஜன்னல் அருகே புதிய புத்தகங்களைப் படிக்கிறார்கள்.",
    "te": "గ్రంథాలయం ఉదయం తొమ్మిది గంటలకు తెరుస్తారు, పిల్లలు కిటికీ పక్కన కొత్త పుస్తకాలు చదువుతారు.",
    "kn": "ಗ್ರಂಥಾಲಯ ಬೆಳಿಗ್ಗೆ ಒಂಬತ್ತು ಗಂಟೆಗೆ ತೆರೆಯುತ್ತದೆ, ಮಕ್ಕಳು ಕಿಟಕಿಯ ಬಳಿ ಹೊಸ ಪುಸ್ತಕಗಳನ್ನು ಓದುತ್ತಾರೆ.",
    "ml": "ഗ്രന്ഥശാല രാവിലെ ഒമ്പതു മണിക്ക് തുറക്കും, കുട്ടികൾ ജനാലയ്ക്കരികിൽ പുതിയ പുസ്തകങ്ങൾ വായിക്കും.",
    "si": "පුස්තකාලය උදේ නවයට විවෘත වේ, ළමයි ජනේලය අසල තම අලුත් පොත් කියවති.",
    "th": "ห้องสมุดเปิดเวลาเก้าโมงเช้า และเด็กๆ อ่านหนังสือเล่มใหม่ของพวกเขาข้างหน้าต่างริมแม่น้ำ",
    "lo": "ຫໍສະໝຸດເປີດເວລາເກົ້າໂມງເຊົ້າ ແລະເດັກນ້ອຍອ່ານປຶ້ມໃໝ່ຂອງເຂົາເຈົ້າຢູ່ຂ້າງປ່ອງຢ້ຽມ",
    "km": "បណ្ណាល័យបើកនៅម៉ោងប្រាំបួនព្រឹក ហើយក្មេងៗអានសៀវភៅថ្មីរបស់ពួកគេនៅក្បែរបង្អួច។",
    "my": "စာကြည့်တိုက်သည် နံနက်ကိုးနာရီတွင် ဖွင့်ပြီး ကလေးများသည် ပြတင်းပေါက်ဘေးတွင် စာအုပ်သစ်များ ဖတ်ကြသည်။",
    "bo": "དཔེ་མཛོད་ཁང་ཞོགས་པ་ཆུ་ཚོད་དགུ་པར་སྒོ་འབྱེད་ཀྱི་ཡོད། ཕྲུ་གུ་ཚོས་དཔེ་ཆ་གསར་པ་ཀློག་གི་ཡོད།",
    "ka": "ბიბლიოთეკა დილის ცხრა საათზე იღება, ბავშვები კი ფანჯარასთან თავიანთ ახალ წიგნებს კითხულობენ.",
    "hy": "Գրադարանը բացվում է առավոտյան ժամը իննին, և երեխաները պատուհանի մոտ կարդում են իրենց նոր գրքերը։",
    "am": "ቤተ መጻሕፍቱ ጠዋት ሦስት ሰዓት ላይ ይከፈታል፣ ልጆችም በመስኮቱ አጠገብ አዲሶቹን መጻሕፍት ያነባሉ።",
    "zh": "图书馆早上九点开门，孩子们坐在窗边读他们的新书。老师说：“请安静！”大家都笑了（很小声）。",
    "ja": "図書館は朝九時に開き、子どもたちは窓のそばで新しい本を読む。「静かに」と先生がノートに書いた。",
    "ko": "도서관은 아침 아홉 시에 문을 열고, 아이들은 창가에서 새 책을 읽는다.",
    "new-emoji": "The library opens at nine, and \U0001fa77 children read new books by the \U0001fae8 window.",
    "emoji": "The library opens at nine 👩🏽‍💻 and children ❤️ read new books 😀 by the window 🇫🇷 today.",
    "quotes": "“The library’s open—at nine…” they said; it’s ‘new’ – don’t wait • read § 3 © 2024 for 5 € ½ × 3.",
    "math": "∀x ∈ ℝ: ∑ aᵢ·xⁱ ≤ ∫ f(x) dx ⇒ α ≠ β ∧ ‖v‖₂ → ∞, √2 ≈ 1.414 ± 0.001, A ⊆ B ∪ C.",
    "digits": "12 3.14 2024-05-17 08:15:00 1,000,000 0x1F 99.9% 1.2.3 5/7 1e-9 2:30 0.5 -7 1.2.3.4 60 Hz 12:30",
    "code": "def read(self, path: str) -> dict[str, int]:\n    return {name: len(name) for name in self.names[1:]}\n",
    "latex": r"Let $x_i \in \mathbb{R}$ be \emph{given}, so \begin{align} \frac{a}{b} &= \sum_i x_i^2 \end{align}.",
}  # fmt: skip
"""Kind of text -> its words; languages by their code."""
ADDRESSES = "Write to jane@acme.org or call 93.184.21.3, see http://host.org:80/a and 2a00:1450:4001:81b::200e."
"""Three addresses in 95 bytes; each is judged by the text around it, so the row counts addresses, not bytes."""
ADDRESSES_IN_LINE = 3
COMBINING = {"vi-nfd": "vi", "ko-nfd": "ko", "fr-nfd": "fr"}
"""Kinds whose letters are decomposed, as macOS writes them."""
DENSE = "addresses"
PATHS = {
    "normalize": "line ends, controls and composition",
    "repair": "the same with a search for wrong decoding",
    "redact": "search for addresses of e-mail, IPv4 and IPv6",
    "language": "language of a document",
    "html": "text of a page",
    "markdown": "text of a Markdown document",
    "latex": "LaTeX without comments",
    "records": "JSON lines with a date each",
    "paragraphs": "joined lines of paragraphs",
    "tokens": "ids of texts, by the encoder that the gate admits",
}


def texts_of_kinds(documents: int = DOCUMENTS, size: int = DOCUMENT) -> dict[str, list[str]]:
    """Return `documents` texts of about `size` bytes by kind."""
    chance = random.Random(7)
    sentences = SENTENCES | {DENSE: ADDRESSES}
    kinds = {name: _documents(sentence, documents, size, chance) for name, sentence in sentences.items()}
    return kinds | {
        name: [unicodedata.normalize("NFD", text) for text in kinds[base]] for name, base in COMBINING.items()
    }


def _documents(sentence: str, documents: int, size: int, chance: random.Random) -> list[str]:
    words = sentence.split(" ")
    if max(map(len, words)) > len(sentence) / 4 and "\n" not in sentence:  # a script without blanks
        words = [sentence[at : at + 4] for at in range(0, len(sentence), 4)]
    blank = " " if sentence.split(" ") == words else ""
    mean = len(sentence.encode())
    texts = []
    for _ in range(documents):
        orders = (blank.join(chance.sample(words, len(words))) for _ in range(max(1, size // mean)))
        texts.append("".join(order + chance.choice((" ", " ", "\n\n")) for order in orders).strip())
    return texts


def slowest(run: Session, name: str) -> Row:
    """What a path costs, in the kind of text where a byte costs most."""
    path = name.partition("/")[2]
    rates = dict(run.once("scripts", lambda: _rates(run))[path])
    if path == "redact":
        del rates[DENSE]
    worst = sorted(rates, key=lambda kind: float(rates[kind]))
    note = ", ".join(f"{kind} {rates[kind]:.0f}" for kind in worst[:4])
    note += f"; median {rates[worst[len(worst) // 2]]:.0f} of {len(rates)} kinds"
    return measured(name, rates[worst[0]], f"{PATHS[path]}: {note}", rates=rates)


def address(run: Session, name: str) -> Row:
    """What one address costs, in documents made of them."""
    rate = run.once("scripts", lambda: _rates(run))["redact"][DENSE]
    size = len(ADDRESSES) / ADDRESSES_IN_LINE
    return measured(name, size / rate, f"{rate:.1f} MB per CPU s of text with an address in {size:.0f} bytes")


def _rates(run: Session) -> dict[str, dict[str, float]]:
    """Return MB per CPU second by path and kind."""
    folder = run.settings.folder / "scripts"
    folder.mkdir(parents=True)
    source, warm_up = folder / "texts.json", folder / "first.json"
    source.write_text(json.dumps(texts_of_kinds()))
    warm_up.write_text(json.dumps(texts_of_kinds(2)))
    facts = run.bench.cost("ours.scripts", source, warm_up, tokenizer=str(Path(run.inputs.tokenizer))).facts
    rates: dict[str, dict[str, float]] = facts["rates"]
    return rates
