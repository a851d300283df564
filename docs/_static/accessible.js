// What the theme lacks: names of the two sidebars, scrolling by keyboard, a heading of the search.
document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Pages");
document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
for (const wide of document.querySelectorAll("pre, .table-wrapper")) wide.tabIndex = 0;
const results = document.getElementById("search-results");
if (results && !document.querySelector("h1")) {
  const heading = document.createElement("h1");
  heading.textContent = "Search";
  results.before(heading);
}
