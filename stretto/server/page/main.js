// Starts everything. What tests look at is under one name.
settings.start(() => live.reconnect());
lanes.start();
figures.start();
chat.start();
live.start();
window.stretto = { chat, lanes, figures, live, settings, markdown };
document.body.dataset.ready = "";
