// Shows the OpenAPI document in Swagger UI. The key is the console's: it comes from the link of `penstock up` or from
// the form, is kept in the tab, and is sent to this gateway only.
const DOCUMENT = "/v1/openapi.json";
const form = document.getElementById("ask");
const given = /^#key=([\w-]+)$/.exec(location.hash);
if (given) {
  sessionStorage.setItem("penstock-key", given[1]);
  history.replaceState(null, "", location.pathname);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("penstock-key", document.getElementById("key").value);
  show();
});

async function show() {
  const key = sessionStorage.getItem("penstock-key");
  const answer = await fetch(DOCUMENT, { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  form.hidden = answer.ok;
  if (!answer.ok) {
    document.getElementById("problem").textContent = key ? (await answer.json()).detail : "";
    return;
  }
  const ui = SwaggerUIBundle({
    spec: await answer.json(),
    domNode: document.getElementById("api"),
    docExpansion: "list",
    validatorUrl: null,
    onComplete: () => ui.preauthorizeApiKey("key", key),
  });
}

show();
