"""The page of `crosshead inspect` in a real browser: layout, mouse and keyboard, and the model's own numbers."""

import pytest
import torch
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import toys
from browser import BROWSER, DRIVER, opened, running, until
from crosshead.evals.inspect.inputs import Inputs
from crosshead.evals.inspect.page import write_report
from crosshead.evals.inspect.report import inspect_report
from toy_checkpoints import character_tokenizer, write_model

MINUS, DASH = "\N{MINUS SIGN}", "\N{EN DASH}"
TEXTS = {
    "prose": "the cat sat on the mat, and the dog\n\nsaw that the cat sat there. <b>so</b> it goes & goes.",
    "code": "def add(a, b):\n    return a + b",
}
MODELS = {"stock": {}, **toys.CASES}
SEEN = ("mixture", "differential", "talking", "knocking+mixture", "stock", "pair")
WIDE, NARROW = 1280, 400

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("inspect_page"),
    pytest.mark.skipif(
        not (BROWSER and DRIVER), reason="no browser: Debian's packages are called chromium and chromium-driver"
    ),
]


@pytest.fixture(scope="module")
def pages_folder(tmp_path_factory):
    """The folder of pages: one for each model, and one with a stock model beside a mixed one."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("stock", "differential", "mixture", "talking", "knocking+mixture"):
        mixers = MODELS[name]
        model = toys.mixed_model("Llama", mixers) if mixers else toys.stock_model("Llama")
        write_model(model, folder / name)
    pages = {name: [name] for name in SEEN if name != "pair"} | {"pair": ["stock", "differential"]}
    for name, shown in pages.items():
        report = inspect_report([str(folder / each) for each in shown], Inputs(TEXTS), lambda *_: None)
        write_report(report, folder / f"{name}.html")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with running(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def weights_of(folder, name, layer):
    """Return the attention weights (heads, T, T) of the prose, computed by the model itself."""
    mixers = MODELS[name]
    model = toys.mixed_model("Llama", mixers) if mixers else toys.stock_model("Llama")
    tokens = torch.tensor([character_tokenizer()(TEXTS["prose"])["input_ids"]])
    with torch.no_grad():
        return model(tokens, output_attentions=True).attentions[layer][0]


def top_weights(row):
    """Return the indices and values of the five largest weights of a row, in the page's order."""
    indices = sorted(range(len(row)), key=lambda index: -abs(row[index]))[:5]
    return [(index, row[index]) for index in indices if row[index] != 0]


def assert_same_weights(shown, expected):
    """Assert the same tokens in the same order, and weights equal to the printed digits."""
    assert [token for token, _ in shown] == [token for token, _ in expected]
    for (_, text), (_, weight) in zip(shown, expected, strict=True):
        number = float(text.removesuffix(" %").replace(MINUS, "-").replace("<", ""))
        assert number == pytest.approx(100 * weight, abs=0.06 if abs(weight) < 1 else 0.6)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", SEEN)
def test_page_fits_both_widths_and_colour_schemes(pages_folder, browser, name, width, scheme):
    with opened(browser, pages_folder / f"{name}.html", width, scheme) as page:
        for layer in (0, 1):
            browser.execute_script(
                "const range = document.getElementById('layer'); range.value = arguments[0];"
                "range.dispatchEvent(new Event('input'))",
                layer,
            )
            until(browser, lambda layer=layer: page.title("gallery") == f"Heads of layer {layer}")
            sizes = browser.execute_script(
                "const root = document.documentElement; return [root.scrollWidth, root.clientWidth, innerWidth]"
            )
            assert sizes[0] <= sizes[1] <= sizes[2] == width
        shown = {section.get_attribute("id") for section in page.all("main > section") if section.is_displayed()}
        routed = {"routing"} if "mixture" in name else set()
        learnt = set() if name == "stock" else {"matrices"}
        assert shown == {"overview", "gallery", "inspector", "norms", "similarity", "about"} | routed | learnt
        dark = sum(map(int, page.background()[4:-1].split(","))) < 3 * 128
        assert dark == (scheme == "dark")
        assert "a page holds up to 512" in page.one("#texts").text


@pytest.mark.parametrize("name", ["talking", "stock"])
def test_clicked_token_lists_top_attention_weights_of_the_model(pages_folder, browser, name):
    with opened(browser, pages_folder / f"{name}.html") as page:
        for layer, head, token in ((1, 0, 41), (1, 2, 17), (0, 3, 3)):
            page.one("#layer").send_keys(Keys.END if layer else Keys.HOME)
            until(browser, lambda layer=layer: page.title("gallery") == f"Heads of layer {layer}")
            page.one(f"#gallery [data-head='{head}']").click()
            page.option(token).click()
            until(browser, lambda token=token: page.option(token).get_attribute("aria-selected") == "true")
            assert page.title("inspector").startswith(f"Layer {layer}, head {head},")
            weights = weights_of(pages_folder, name, layer)[head]
            assert_same_weights(page.rows("keys"), top_weights(weights[token].tolist()))
            assert_same_weights(page.rows("querys"), top_weights(weights[:, token].tolist()))


def test_map_and_token_shades_match_model_weights(pages_folder, browser):
    with opened(browser, pages_folder / "stock.html") as page:
        page.one("#gallery [data-head='2']").click()
        page.option(40).click()
        weights = weights_of(pages_folder, "stock", 1)[2]
        size = len(weights)
        roots = torch.cat([weights[40, :41], weights[41:, 40]]).sqrt()
        shaded = [bool(option.get_attribute("style")) for option in page.all("#inspector .text [role=option]")]
        assert shaded == [bool(round(root * 127)) for root in roots.tolist()]
        box = page.one("#inspector .frame canvas").rect
        query, key = 40, int(weights[40].argmax())
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", page.one("#inspector .frame"))
        webdriver.ActionChains(browser).move_to_element_with_offset(
            page.one("#inspector .frame canvas"),
            int(box["width"] * ((key + 0.5) / size - 0.5)),
            int(box["height"] * ((query + 0.5) / size - 0.5)),
        ).perform()
        reading = page.one("#inspector .map .reading").text
        assert f"({query})" in reading and f"({key})" in reading
        assert float(reading.rpartition("about ")[2].removesuffix(" %")) == pytest.approx(
            100 * weights[40, key], abs=1
        )


def test_click_in_weight_list_or_map_selects_the_token(pages_folder, browser):
    with opened(browser, pages_folder / "stock.html") as page:
        page.option(50).click()
        token, _ = page.rows("keys")[1]
        page.all("#inspector .weights.keys button")[1].click()
        assert page.option(token).get_attribute("aria-selected") == "true"
        size = len(page.all("#inspector .text [role=option]"))
        box = page.one("#inspector .frame canvas").rect
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", page.one("#inspector .frame"))
        webdriver.ActionChains(browser).move_to_element_with_offset(
            page.one("#inspector .frame canvas"), 0, int(box["height"] * (30.5 / size - 0.5))
        ).click().perform()
        assert page.option(30).get_attribute("aria-selected") == "true"


def test_keyboard_navigation(pages_folder, browser):
    with opened(browser, pages_folder / "knocking+mixture.html") as page:
        reached = set()
        for _ in range(60):
            page.press(Keys.TAB)
            reached.add(
                browser.execute_script("const e = document.activeElement; return e.id || e.parentElement.className")
            )
        assert {"layer", "theme", "heads", "gallery", "text"} <= reached

        page.one("#layer").send_keys(Keys.HOME)
        until(browser, lambda: page.title("gallery") == "Heads of layer 0")
        page.one("#gallery [aria-selected=true]").send_keys(Keys.ARROW_RIGHT)
        assert page.focused("data-head") == "1"
        assert page.title("inspector").startswith("Layer 0, head 1,")
        page.press(Keys.END)
        assert page.title("inspector").startswith("Layer 0, head 3,")

        page.one("#inspector .text [aria-selected=true]").send_keys(Keys.HOME)
        assert page.focused("data-token") == "0"
        page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
        assert page.focused("data-token") == "1"
        last = len(page.all("#inspector .text [role=option]")) - 1
        assert page.one("#inspector .chosen").text.endswith(f"token 1 of 0{DASH}{last}")
        page.press(Keys.ARROW_DOWN)
        lower = int(page.focused("data-token"))
        assert page.option(lower).rect["y"] > page.option(1).rect["y"]
        page.press(Keys.ARROW_UP)
        assert page.focused("data-token") == "1"

        page.one("#overview [aria-selected=true]").send_keys(Keys.ARROW_RIGHT)
        until(browser, lambda: page.title("gallery") == "Heads of layer 1")
        assert (page.focused("data-layer"), page.focused("data-head")) == ("1", "3")
        page.press(Keys.ARROW_UP)
        until(browser, lambda: page.title("inspector").startswith("Layer 1, head 2,"))


def test_text_measure_and_theme_controls(pages_folder, browser):
    with opened(browser, pages_folder / "mixture.html") as page:
        options = page.all("#controls select")[0].find_elements(By.TAG_NAME, "option")
        assert [option.text for option in options] == list(TEXTS)
        options[1].click()
        until(browser, lambda: len(page.all("#inspector .text [role=option]")) < 40)
        labels = [option.text for option in page.all("#overview select option")]
        assert {"head load", "mean gate", "mean routing score"} <= set(labels)
        page.all("#overview select option")[labels.index("head load")].click()
        names = [cell.get_attribute("aria-label") for cell in page.all("#overview [data-layer='0']")]
        assert names[:2] == ["layer 0, head 0: 1", "layer 0, head 1: 1"]  # the shared heads
        before, picture = page.background(), page.picture("#gallery canvas")
        while "dark" not in page.one("#theme").text:
            page.one("#theme").click()
        assert page.background() != before
        assert page.picture("#gallery canvas") != picture


def test_overview_cells_are_labelled_with_map_names(pages_folder, browser):
    with opened(browser, pages_folder / "differential.html") as page:
        page.all("#overview [data-layer='1']")[2].click()
        until(browser, lambda: page.title("inspector").startswith("Layer 1, softmax 0,"))
        assert "softmax 0: " in page.one("#overview [aria-selected=true]").get_attribute("aria-label")
        assert page.one("#gallery [aria-selected=true] b").text == "Softmax 0"


def test_value_norms_are_labelled_by_key_value_head(pages_folder, browser):
    with opened(browser, pages_folder / "stock.html") as page:
        labels = [option.text for option in page.all("#overview select option")]
        page.all("#overview select option")[labels.index("norm of values")].click()
        page.all("#overview [data-layer='1']")[1].click()
        until(browser, lambda: page.title("inspector").startswith("Layer 1, head 2,"))
        for head in (2, 3):
            page.one(f"#gallery [data-head='{head}']").click()
            until(browser, lambda head=head: page.title("inspector").startswith(f"Layer 1, head {head},"))
            name = page.one("#overview [aria-selected=true]").get_attribute("aria-label")
            assert name.startswith("layer 1, key/value head 1: ")
        assert page.one("#norms .weights:nth-child(2) .here th").text == "1"


def test_matrix_card_shows_the_talking_matrix(pages_folder, browser):
    with opened(browser, pages_folder / "talking.html") as page:
        cells = [cell.text for cell in page.all("#matrices .card:first-child td") if cell.text]
        model = toys.mixed_model("Llama", MODELS["talking"])
        matrix = model.model.layers[1].self_attn.mixers["talking"].logits.weight.detach()
        shown = [float(cell.replace(MINUS, "-")) for cell in cells]
        assert shown == pytest.approx(matrix.flatten().tolist(), abs=0.006)
        assert not page.all("#matrices .tools input")  # no matrix here is near the identity


def test_two_models_share_token_and_head_selection(pages_folder, browser):
    with opened(browser, pages_folder / "pair.html") as page:
        assert "stock and differential" in page.one("h1").text
        page.option(40).click()
        assert page.option(40, column=2).get_attribute("aria-selected") == "true"
        page.one("#gallery .column:nth-child(2) [data-head='1']").click()
        first, second = weights_of(pages_folder, "stock", 1), weights_of(pages_folder, "differential", 1)
        assert_same_weights(page.rows("keys", column=1), top_weights(first[1, 40].tolist()))
        mixers = toys.mixed_model("Llama", {"differential": {}}).model.layers[1].self_attn.mixers
        lambda_ = mixers["differential"](mixers["differential"].lambda_q1)
        difference = second[2, 40] - lambda_.detach() * second[3, 40]
        assert_same_weights(page.rows("keys", column=2), top_weights(difference.tolist()))
        page.one(
            "#gallery .column:nth-child(2) [data-head='5']"
        ).click()  # the last softmax: the stock model has no sixth
        assert_same_weights(page.rows("keys", column=2), top_weights(second[3, 40].tolist()))
        assert_same_weights(page.rows("keys", column=1), top_weights(first[3, 40].tolist()))
