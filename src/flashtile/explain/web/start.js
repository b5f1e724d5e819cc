// Language and theme, which are remembered where the browser allows it; then all parts.

function remembered(name) {
  try {
    return localStorage.getItem(`flashtile.${name}`);
  } catch {
    return null; // a page from a file may have no storage
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(`flashtile.${name}`, value);
  } catch {
    // then not
  }
}

function chooseTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").value = name;
}

const languages = byId("language");
const choice = `language.${language}`; // a page that opens in another language has a choice of its own
choices(languages, DATA.languages);
if (Object.hasOwn(DATA.languages, remembered(choice))) language = remembered(choice);
languages.value = language;
languages.addEventListener("change", () => {
  language = languages.value;
  remember(choice, language);
  translate();
});

const themes = [...byId("theme").options].map(({ value }) => value);
chooseTheme(themes.includes(remembered("theme")) ? remembered("theme") : "auto");
byId("theme").addEventListener("change", (event) => {
  chooseTheme(event.target.value);
  remember("theme", event.target.value);
});

startRace(byId("race-figure"), "forward");
redraws.push(drawReal);
startSkipping();
startBackward();
startWork();
startCode();
startOnline(); // last: it loads the row that others show
translate();
