// Behaviour of the page that needs no server: the player, the strip, files that are dropped, keys.
(() => {
  "use strict";
  const STEP_SECONDS = 5, LOOK_MS = 3000, PATIENCE_MS = 10000;

  const clock = (seconds) => {
    const whole = Math.floor(seconds);
    const two = (value) => String(value).padStart(2, "0");
    const hours = Math.floor(whole / 3600);
    const minutes = Math.floor(whole / 60) % 60;
    return (hours ? `${hours}:${two(minutes)}` : `${minutes}`) + `:${two(whole % 60)}`;
  };

  const files = () => [...document.querySelectorAll("#player .file")];
  const shownFile = () => files()[Number(document.querySelector("#player")?.dataset.shown || 0)] || files()[0];
  const media = (inside) => (inside || shownFile())?.querySelector("video");

  function seek(seconds, inside) {
    const video = media(inside);
    if (!video) return;
    video.currentTime = Math.max(0, Math.min(seconds, video.duration || seconds));
    follow(video);
    if (video.getBoundingClientRect().bottom < 0 || video.getBoundingClientRect().top > innerHeight) {
      video.scrollIntoView({block: "center"});
    }
  }

  // Whether the model saw a moment: the clips are sorted by their start.
  function isSeen(bar, seconds) {
    if (bar.edgesText !== bar.dataset.clips) {
      bar.edgesText = bar.dataset.clips;
      bar.edges = bar.edgesText ? bar.edgesText.split(";").map((pair) => pair.split(",").map(Number)) : [];
    }
    let low = 0, high = bar.edges.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (bar.edges[middle][0] <= seconds) low = middle + 1; else high = middle;
    }
    // At the very end stands what came last.
    seconds = Math.min(seconds, Number(bar.getAttribute("aria-valuemax")) - 0.1);
    return low > 0 && seconds < Math.max(bar.edges[low - 1][1], bar.edges[low - 1][0] + 0.05);
  }

  // The light on the strip stands where the player is.
  function follow(video) {
    const file = video.closest(".file");
    const bar = file?.querySelector(".strip-bar");
    if (!bar || file !== shownFile()) return;
    const seconds = video.currentTime, end = Number(bar.getAttribute("aria-valuemax"));
    const isDone = file.querySelector(".strip").dataset.seen === "true";
    const words = isDone ? ["not seen by the model", "seen by the model"] : ["will not be seen", "will be seen"];
    const moment = `${clock(seconds)} · ${words[Number(isSeen(bar, seconds))]}`;
    // The server redraws what is inside of the player; what is noted on the outside stays.
    const style = document.documentElement.style;
    style.setProperty("--at", `${Math.min(100, 100 * seconds / end)}%`);
    style.setProperty("--moment", `"${moment}"`);
    bar.setAttribute("aria-valuenow", seconds.toFixed(1));
    bar.setAttribute("aria-valuetext", moment);
  }
  for (const name of ["timeupdate", "seeked", "loadedmetadata"]) {
    document.addEventListener(name, (event) => follow(event.target), true);
  }
  // The tab of the file that is shown; other files in view show the one that the server chose.
  let opened = "";
  function markTab() {
    const player = document.querySelector("#player"), box = player?.querySelector(".files");
    if (box && box.dataset.opened !== opened) {
      opened = box.dataset.opened;
      player.dataset.shown = box.dataset.chosen;
    }
    for (const tab of player?.querySelectorAll("[data-show]") || []) {
      const pressed = String(tab.dataset.show === (player.dataset.shown || "0"));
      if (tab.getAttribute("aria-pressed") !== pressed) tab.setAttribute("aria-pressed", pressed);
    }
  }
  const refollow = () => { markTab(); const video = media(); if (video) follow(video); };
  const show = (number) => { document.querySelector("#player").dataset.shown = number; refollow(); };

  function type(selector, text) {
    const field = document.querySelector(`${selector} textarea, ${selector} input`);
    if (!field) return;
    field.value = text;
    field.dispatchEvent(new Event("input", {bubbles: true}));
    field.focus();
  }

  function shade(dark) {
    document.body.classList.toggle("dark", dark);
    localStorage.setItem("apollo-shade", dark ? "dark" : "light");
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-seek], [data-show], [data-ask], #shade, #unfold, .strip-bar");
    if (!button) return;
    if (button.matches("#shade")) shade(!document.body.classList.contains("dark"));
    else if (button.matches("#unfold")) {
      button.setAttribute("aria-expanded", String(button.getAttribute("aria-expanded") !== "true"));
    }
    else if (button.dataset.seek) {
      const of = (button.dataset.of || "").split(" ").filter(Boolean);
      if (of.length && !of.includes(String(files().indexOf(shownFile())))) show(of[0]);
      seek(Number(button.dataset.seek), button.closest(".file"));
    }
    else if (button.dataset.show) show(button.dataset.show);
    else if (button.dataset.ask) type("#question", button.dataset.ask);
    else {
      const box = button.getBoundingClientRect();
      const share = (event.clientX - box.left) / box.width;
      seek(share * Number(button.getAttribute("aria-valuemax")), button.closest(".file"));
    }
  });

  // The slider of the strip, the marks on it, and Escape to stop.
  document.addEventListener("keydown", (event) => {
    const bar = event.target.closest?.(".strip-bar"), mark = event.target.closest?.(".strip-mark");
    const video = media(event.target.closest?.(".file"));
    if (event.key === "Escape") document.querySelector("#stop")?.click();
    if (mark && ["ArrowLeft", "ArrowRight"].includes(event.key)) {
      const next = event.key === "ArrowRight" ? mark.nextElementSibling : mark.previousElementSibling;
      (next || mark).focus();
      event.preventDefault();
    }
    if (!bar || !video) return;
    const moves = {
      ArrowLeft: video.currentTime - STEP_SECONDS, ArrowDown: video.currentTime - STEP_SECONDS,
      ArrowRight: video.currentTime + STEP_SECONDS, ArrowUp: video.currentTime + STEP_SECONDS,
      PageDown: video.currentTime - 60, PageUp: video.currentTime + 60,
      Home: 0, End: Number(bar.getAttribute("aria-valuemax")),
    };
    if (event.key in moves) seek(moves[event.key], bar.closest(".file"));
    else if (event.key === " " || event.key === "Enter") video.paused ? video.play() : video.pause();
    else return;
    event.preventDefault();
  });

  // Words of the page itself, above the player; the next file takes them away.
  function tell(text) {
    document.querySelector("#told-here")?.remove();
    if (!text) return;
    const line = document.createElement("p");
    line.id = "told-here";
    line.className = "alert";
    line.setAttribute("role", "alert");
    line.textContent = text;
    document.querySelector("#open-row").after(line);
  }
  document.addEventListener("change", (event) => {
    const field = event.target;
    if (field.type !== "file" || !field.closest("#open-row")) return;
    const most = Number(document.querySelector("[data-most-bytes]").dataset.mostBytes);
    const large = [...field.files].find((file) => file.size > most);
    tell(large && `${large.name} has ${Math.ceil(large.size / 1e6).toLocaleString("en")} MB; allowed are ` +
      `${Math.floor(most / 1e6).toLocaleString("en")} MB; open it by its path, where it lies`);
    if (!large) return;
    event.stopImmediatePropagation();
    field.value = "";
  }, true);

  // A file that is dropped anywhere goes the way of the upload button.
  const carries = (event) => [...(event.dataTransfer?.types || [])].includes("Files");
  for (const name of ["dragover", "drop"]) {
    document.addEventListener(name, (event) => {
      if (!carries(event)) return;
      event.preventDefault();
      const field = document.querySelector("#open-row input[type=file]");
      if (name !== "drop" || !field) return;
      field.files = event.dataTransfer.files;
      field.dispatchEvent(new Event("change", {bubbles: true}));
    });
  }

  // A reload keeps what was typed; the page is also loaded anew when the server was started again.
  const question = () => document.querySelector("#question textarea");
  addEventListener("pagehide", () => {
    sessionStorage.setItem("apollo-question", question()?.value || "");
    sessionStorage.setItem("apollo-had", document.querySelector(".turn, .file") ? window.apolloPage.key() : "");
  });

  const random = () => [...crypto.getRandomValues(new Uint8Array(18))]
    .map((byte) => byte.toString(16).padStart(2, "0")).join("");

  // The page says that it is there. A server that was started again knows nothing of it and answers
  // none of its events, and a talk that has ended is not in view any more.
  const pageId = random();
  const presence = (state) => `presence?page=${pageId}&state=${state}`;
  let server = "", isAway = false, isLooking = false, isLeaving = false;
  async function lookForServer() {
    if (isLooking || isLeaving) return;
    isLooking = true;
    try {
      const state = document.hidden ? "hidden" : "shown";
      const hasArrived = document.querySelector("#model .chip") !== null;
      const signal = AbortSignal.timeout(PATIENCE_MS);
      const told = await (await fetch(presence(state), {method: "POST", cache: "no-store", signal})).json();
      if (isAway || (server && told.server !== server) || (hasArrived && !told.known)) location.reload();
      server = told.server;
    } catch {
      isAway = true;
      tell("The server does not answer; the page is loaded anew when it does. " +
        "A browser keeps six lines to it: where many tabs of it are open, close some");
    }
    isLooking = false;
  }
  setInterval(lookForServer, LOOK_MS);
  document.addEventListener("visibilitychange", lookForServer);
  addEventListener("pagehide", () => {
    isLeaving = true;
    navigator.sendBeacon(presence("gone"));
  });
  lookForServer();

  // The talk stays at its end while it grows, unless the reader has scrolled up.
  function keepAtEnd(box) {
    let atEnd = true;
    box.addEventListener("scroll", () => {
      atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    });
    new MutationObserver(() => { if (atEnd) box.scrollTop = box.scrollHeight; })
      .observe(box, {childList: true, subtree: true, characterData: true});
  }
  const arrival = new MutationObserver(() => {
    const box = document.querySelector("#talk"), player = document.querySelector("#player");
    if (!box || !player || !question()) return;
    arrival.disconnect();
    const typed = sessionStorage.getItem("apollo-question");
    if (typed && !question().value) type("#question", typed);
    keepAtEnd(box);
    new MutationObserver(refollow)
      .observe(player, {childList: true, subtree: true, attributeFilter: ["data-clips", "data-seen"]});
    const wanted = localStorage.getItem("apollo-shade");
    if (wanted) shade(wanted === "dark");
    box.setAttribute("role", "log");
    box.setAttribute("aria-label", "Talk");
    box.setAttribute("tabindex", "0");
  });
  document.addEventListener("DOMContentLoaded", () => arrival.observe(document.body, {childList: true, subtree: true}));
  if (document.body) arrival.observe(document.body, {childList: true, subtree: true});

  let isArrived = false;
  addEventListener("pagehide", () => sessionStorage.removeItem("apollo-open"));
  addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });

  window.apolloPage = {
    // Which talk this is, whether there was anything in it, and which page shows it.
    arrive() {
      const key = this.key();
      return [key, sessionStorage.getItem("apollo-had") === key ? "yes" : "", pageId];
    },
    // Names the talk of this tab; it outlives a reload, and another tab has its own.
    key() {
      let key = sessionStorage.getItem("apollo-key");
      if (isArrived) return key;
      // A tab that was duplicated brings the key of the first along, which is still open there.
      const isCopy = sessionStorage.getItem("apollo-open") && !document.wasDiscarded;
      sessionStorage.setItem("apollo-open", "1");
      isArrived = true;
      if (!key || isCopy) {
        key = random();
        sessionStorage.setItem("apollo-key", key);
      }
      return key;
    },
    save(name, text) {
      if (!name) return;
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], {type: "text/plain"}));
      link.download = name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    },
    pickText() {
      return new Promise((resolve) => {
        const field = document.createElement("input");
        field.type = "file";
        field.accept = ".json,application/json";
        field.addEventListener("change", async () => resolve(await field.files[0].text()));
        field.addEventListener("cancel", () => resolve(""));
        field.click();
      });
    },
  };
})();
